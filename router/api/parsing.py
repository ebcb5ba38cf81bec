"""From a request's bytes to a wire model, or to one sentence that says what is wrong with them."""

import json
import math
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import InvalidRequestError

__all__ = ["parse_body"]

BodyT = TypeVar("BodyT", bound=BaseModel)

ECHOED_CHARS_MAX = 100
"""So much of a client's own text is repeated in an error message."""


def parse_body(body: bytes, model: type[BodyT]) -> BodyT:
    """Read a JSON object strictly (RFC 8259, UTF-8) and validate it.

    Refused besides malformed JSON: NaN and infinities, numbers that overflow to one, a name given twice (one of the two
    would be ignored), lone surrogates (no tokenizer can encode them), nesting too deep to parse.
    Raises InvalidRequestError, with the parameter's path where there is one.
    """
    content = _loads(body)
    if not isinstance(content, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    # Pydantic would say so too, but once for each: a body full of unknown names must not cost an error object apiece.
    unknown = next((name for name in content if name not in model.model_fields), None)
    if unknown is not None:
        raise InvalidRequestError(f"Unknown parameter: '{_clipped(unknown)}'.", param=_clipped(unknown))
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _first_fault(error) from error


def _loads(body: bytes) -> object:
    if not body.strip():
        raise InvalidRequestError("The request body is empty; it must be a JSON object.")
    try:
        text = body.decode("utf-8")
        content: object = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_no_name_twice
        )
        if "\\u" in text:
            # Only an escape can bring a lone surrogate in, for the bytes were valid UTF-8.
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError("The request body is not valid UTF-8.") from error
    except UnicodeEncodeError as error:
        raise InvalidRequestError("The request body contains a lone surrogate, which is no character.") from error
    except RecursionError as error:
        raise InvalidRequestError("The request body is nested too deeply.") from error
    except ValueError as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {_clipped(str(error))}") from error
    return content


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _no_name_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has the same name twice")
    return members


def _first_fault(error: ValidationError) -> InvalidRequestError:
    fault = error.errors(include_url=False, include_input=False)[0]
    path = _path(fault["loc"])
    match fault["type"]:
        case "extra_forbidden":
            sentence = f"Unknown parameter: '{path}'."
        case "missing":
            sentence = f"Missing required parameter: '{path}'."
        case _:
            where = f"Invalid '{path}': " if path else ""
            sentence = f"{where}{fault['msg']}."
    return InvalidRequestError(sentence, param=path or None)


def _path(location: tuple[int | str, ...]) -> str:
    """OpenAI's way to write a place in the body: messages[0].content."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):  # a union's tag is a place in our model, not in the body
            path += f".{_clipped(step)}" if path else _clipped(step)
    return path


def _clipped(text: str) -> str:
    return text if len(text) <= ECHOED_CHARS_MAX else text[:ECHOED_CHARS_MAX] + "…"
