"""Reads what programs save, as trees of numbers, texts and tensors."""

from __future__ import annotations

import csv
import functools
import json
import pickle
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Pixels", "read", "without_dates"]

# Keys of logs whose values are times.
_TIMES = re.compile(r"(runtime|per_second|per_sec|_time|_seconds|elapsed|time)$")
_DATE = re.compile(r"\d{4}-\d\d-\d\d[-_ T]\d\d[-:]\d\d[-:]\d\d([.,]\d+)?|\b1\d{9}\.\d+\b")
_DURATION = re.compile(r"\b\d+(\.\d+)? (seconds|minutes|hours)\b")
_NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.?\d+)(?:[eE][-+]?\d+)?")


def without_dates(text: str) -> str:
    """Return a text with the word DATE in place of dates with a time, and of seconds since 1970; DURATION for "2.5 minutes"."""
    return _DURATION.sub("DURATION", _DATE.sub("DATE", text))


class Pixels(torch.Tensor):
    """The pixels of an image, of which 255 is the brightest."""


def read(path: Path) -> Any:
    """Return a file's contents as a tree of dicts, lists, tensors, numbers and texts."""
    if path.name.startswith("events.out.tfevents"):
        return _events(path)
    if path.name == "model_head.pkl":
        return _joblib(path)
    return _READERS.get(path.suffix, _text)(path)


def _joblib(path: Path) -> Any:
    """Return the attributes of an estimator of scikit-learn, as SetFit saves its heads."""
    import joblib
    import numpy

    attributes = vars(joblib.load(path)).items()
    return {name: torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value for name, value in attributes}


def _safetensors(path: Path) -> Any:
    import safetensors

    with safetensors.safe_open(path, "pt") as file:
        return {"metadata": file.metadata(), **{name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118


@functools.cache
def _made_class(module: str, name: str) -> type:
    return type(name, (), {"__module__": module})


class _Unpickler(pickle.Unpickler):
    """Makes objects of classes of a program, which can't be imported here, with their attributes only."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except ImportError:
            return _made_class(module, name)


_pickle = types.SimpleNamespace(**{**vars(pickle), "Unpickler": _Unpickler})


def _torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_pickle)
    except (RuntimeError, pickle.UnpicklingError):
        pass
    try:
        return pickle.loads(path.read_bytes())
    except pickle.UnpicklingError:  # the name says nothing: data of some format
        return _text(path)


def _json(path: Path) -> Any:
    return _without_times(json.loads(path.read_text()))


def _json_lines(path: Path) -> Any:
    return [_without_times(json.loads(line)) for line in path.read_text().splitlines()]


def _csv(path: Path) -> Any:
    """Return the lines of a table by column, with numbers where they are."""
    with path.open(newline="") as file:
        return [{key: _parsed(value) for key, value in _without_times(line).items()} for line in csv.DictReader(file)]


def _parsed(text: Any) -> Any:
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def _without_times(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_times(value) for key, value in tree.items() if not _TIMES.search(key)}
    if isinstance(tree, list):
        return [_without_times(value) for value in tree]
    return tree


def _image(path: Path) -> Any:
    import numpy
    from PIL import Image

    return torch.from_numpy(numpy.array(Image.open(path).convert("RGBA"))).as_subclass(Pixels)


def _numpy(path: Path) -> Any:
    import numpy

    return torch.from_numpy(numpy.load(path))


def _sound(path: Path) -> Any:
    import numpy
    import scipy.io.wavfile

    rate, samples = scipy.io.wavfile.read(path)
    return {"rate": rate, "samples": torch.from_numpy(numpy.array(samples))}


def _events(path: Path) -> Any:
    """Return a TensorBoard log by tag: scalars, and the pixels of images."""
    import io

    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    log = EventAccumulator(str(path), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    log.Reload()
    tags = log.Tags()

    def pixels(encoded: bytes) -> Any:
        import numpy

        return torch.from_numpy(numpy.array(Image.open(io.BytesIO(encoded)).convert("RGBA"))).as_subclass(Pixels)

    return {
        "scalars": {t: [(e.step, e.value) for e in log.Scalars(t)] for t in tags["scalars"] if not _TIMES.search(t)},
        "images": {tag: [(e.step, pixels(e.encoded_image_string)) for e in log.Images(tag)] for tag in tags["images"]},
        "tensors": {tag: [str(make_ndarray(e.tensor_proto)) for e in log.Tensors(tag)] for tag in tags["tensors"]},
    }


def _text(path: Path) -> Any:
    """Return a text as its numbers and what is between them; the bytes of a file that is no text."""
    contents = path.read_bytes()
    try:
        text = without_dates(contents.decode())
    except UnicodeDecodeError:
        return contents
    return {"text": _NUMBER.sub("#", text), "numbers": [float(number) for number in _NUMBER.findall(text)]}


_READERS: dict[str, Callable[[Path], Any]] = {
    ".safetensors": _safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar"), _torch),
    ".json": _json,
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".png": _image,
    ".npy": _numpy,
    ".wav": _sound,
}
