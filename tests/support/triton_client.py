"""A client of Triton's gRPC streams, which Triton's own Python runs: a line of JSON in for each request, lines out.

{"id": 1, "model": "m", "inputs": {"text_input": "Hello"}}   asks; answered by {"id": 1, "outputs": {...}} for each
                                                response, then by {"id": 1, "end": null, or the error, "final": ...}
{"id": 1, "cancel": true}                                    cancels
{"id": 2, "config": "m"}                                     answered by {"id": 2, "config": {...}}
"""

import json
import sys
import threading
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

TYPES = {bool: ("BOOL", bool), str: ("BYTES", object), int: ("INT32", np.int32), float: ("FP32", np.float32)}
LOCK = threading.Lock()


def write(content: dict[str, Any]) -> None:
    with LOCK:
        print(json.dumps(content), flush=True)


def tensor(name: str, value: Any) -> grpcclient.InferInput:
    """An input; a list of lists of numbers has two dimensions."""
    values = value if isinstance(value, list) else [value]
    first = values
    while isinstance(first, list):
        first = first[0]
    kind, dtype = TYPES[type(first)]
    array = np.array(values, dtype)
    found = grpcclient.InferInput(name, list(array.shape), kind)
    found.set_data_from_numpy(array)
    return found


def listed(values: Any) -> Any:
    return [
        listed(item) if isinstance(item, list) else item.decode() if isinstance(item, bytes) else item
        for item in values
    ]


def begin(address: str, asked: dict[str, Any]) -> grpcclient.InferenceServerClient:
    client = grpcclient.InferenceServerClient(address)

    def take(result: Any, error: Any) -> None:
        if error is not None:
            write(
                {
                    "id": asked["id"],
                    "end": f"{error.status()}: {error.message()}" if asked["status"] else error.message(),
                }
            )
            return
        response = result.get_response()
        found = {output.name: listed(result.as_numpy(output.name).tolist()) for output in response.outputs}
        if found:
            write({"id": asked["id"], "outputs": found})
        if response.parameters["triton_final_response"].bool_param:
            write({"id": asked["id"], "end": None})

    client.start_stream(take, headers={"triton_grpc_error": "true"} if asked["status"] else None)
    inputs = [tensor(name, value) for name, value in asked["inputs"].items()]
    client.async_stream_infer(
        asked["model"], inputs, enable_empty_final_response=True, parameters=asked.get("parameters")
    )
    return client


def main(address: str) -> None:
    clients: dict[int, grpcclient.InferenceServerClient] = {}
    whole = grpcclient.InferenceServerClient(address)
    for line in sys.stdin:
        asked = json.loads(line)
        if "cancel" in asked:
            if (client := clients.pop(asked["id"], None)) is not None:
                client.stop_stream(cancel_requests=asked["cancel"])
        elif "config" in asked:
            write({"id": asked["id"], "config": whole.get_model_config(asked["config"], as_json=True)["config"]})
        else:
            clients[asked["id"]] = begin(address, asked)


if __name__ == "__main__":
    main(sys.argv[1])
