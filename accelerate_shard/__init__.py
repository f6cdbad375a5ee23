"""The Hugging Face Accelerate front end. Not part of this release.

Importing the package works anywhere; using anything of it raises ``ImportError``, so that
``from accelerate_shard import Accelerator`` says what to do instead.
"""

from typing import NoReturn

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    # Dunder look-ups come from the import system and from inspection, not from users.
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"accelerate_shard.{name} is not available: this release of torch-shard-engine has no "
        "Accelerate front end yet. Use torch_shard.shard(model) in place of accelerator.prepare(model), "
        'or Lightning with Trainer(strategy="shard").'
    )
