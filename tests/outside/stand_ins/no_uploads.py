"""A hub that takes every repository and every upload, and keeps nothing: programs end with ``push_to_hub``."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

AFTER = "huggingface_hub.hf_api"


def apply(hub: ModuleType) -> None:
    def create_repo(self: Any, repo_id: str, **settings: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self: Any, **settings: Any) -> Any:
        return SimpleNamespace(commit_url="https://hub.invalid/commit")

    hub.HfApi.create_repo, hub.HfApi.upload_folder = create_repo, upload_folder
