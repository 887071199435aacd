"""The models `preprocessing` and `postprocessing` of a repository in the form of Triton's TensorRT-LLM backend.

Which one it is, its configuration says as parameter `step`. It lies as model.py beside `kvern_model.py`.
"""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from kvern_model import INVALID_ARG, UNAVAILABLE, code_of, error_response, fetch

INPUTS = {
    "preprocessing": {"QUERY": ("STRING", [1])},
    "postprocessing": {
        "TOKENS_BATCH": ("INT32", [-1, -1]),
        "SEQUENCE_LENGTH": ("INT32", [-1]),
        "TEXT": ("STRING", [-1]),
    },
}
OUTPUTS = {
    "preprocessing": {"INPUT_ID": ("INT32", [-1]), "REQUEST_INPUT_LEN": ("INT32", [1])},
    "postprocessing": {"OUTPUT": ("STRING", [-1])},
}


class Failed(Exception):
    """Raised for an answer of kvern that is an error, or for none: Triton's code, and the message."""


class TritonPythonModel:
    """A text as token ids (`preprocessing`), or token ids as texts (`postprocessing`)."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Adds inputs and outputs to a configuration."""
        step = config.as_dict()["parameters"]["step"]["string_value"]
        for name, (kind, dims) in INPUTS[step].items():
            entry = {"name": name, "data_type": f"TYPE_{kind}", "dims": dims}
            config.add_input(entry | ({"optional": True} if name == "TEXT" else {}))
        for name, (kind, dims) in OUTPUTS[step].items():
            config.add_output({"name": name, "data_type": f"TYPE_{kind}", "dims": dims})
        config.set_max_batch_size(1)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the parameters."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._path = parameters["socket"]["string_value"]
        self._run = getattr(self, parameters["step"]["string_value"])

    def execute(self, requests: Any) -> list[Any]:
        """Answers requests, one after the other."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return pb_utils.InferenceResponse(output_tensors=self._run(request))
        except Failed as error:
            return error_response(*error.args)
        except ValueError as error:
            return error_response(INVALID_ARG, str(error))

    def preprocessing(self, request: Any) -> list[Any]:
        """The tokens of a text. Raises Failed, or ValueError for a text that is no UTF-8."""
        text = pb_utils.get_input_tensor_by_name(request, "QUERY").as_numpy().reshape(-1)[0].decode()
        ids = np.array([self._asked("/tokenize", {"prompt": text})["tokens"]], np.int32)
        length = np.array([[ids.shape[1]]], np.int32)
        return [pb_utils.Tensor("INPUT_ID", ids), pb_utils.Tensor("REQUEST_INPUT_LEN", length)]

    def postprocessing(self, request: Any) -> list[Any]:
        """Texts as they come with the tokens, whose pieces alone have no text of their own; without them those of the
        tokens. Raises Failed."""
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT")
        if texts is not None:
            return [pb_utils.Tensor("OUTPUT", texts.as_numpy())]
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy().reshape(-1).tolist()
        beams = tokens.reshape(len(lengths), -1).tolist()
        found = [
            self._asked("/detokenize", {"tokens": row[:length]})["prompt"].encode()
            for row, length in zip(beams, lengths, strict=True)
        ]
        return [pb_utils.Tensor("OUTPUT", np.array([found], np.object_))]

    def _asked(self, route: str, body: dict[str, Any]) -> Any:
        status, content = fetch(self._path, route, json.dumps(body).encode())
        if not status:
            raise Failed(UNAVAILABLE, f"kvern gave no whole answer at {self._path}: ask again")
        try:
            found = json.loads(content)
            if status != 200:
                raise Failed(code_of(status), found["error"]["message"])
        except (ValueError, KeyError, TypeError):
            raise Failed(UNAVAILABLE, f"kvern's answer to {route} is wrong, with status {status}") from None
        return found
