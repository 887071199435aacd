// What the page asks of its server. Addresses are relative, so that the server may sit behind a path.

/** Raised for every failure, with a message that a reader understands. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = text || response.statusText;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not one of the server's own errors: a proxy's, perhaps
  }
  throw new ServerError(`${message} (HTTP ${response.status})`, response.status);
}

export const metrics = async (signal) => (await request("metrics", { signal })).text();

/** Each with its `id`; an adapter has its model as `parent`. */
export const models = async () => (await (await request("v1/models")).json()).data;

/** The chunks of a streamed chat completion. Raises ServerError, also for an answer that breaks off. */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message);
    yield chunk;
  }
  throw new ServerError("The answer broke off: the connection was closed.");
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The answer broke off: the connection was lost.");
    }
    if (part.done) return;
    const lines = (rest + part.value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
