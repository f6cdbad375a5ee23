"""The documentation is what the code says: the reference is up to date, links lead somewhere, errors are explained."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from torch_shard import errors

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "bench" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def test_the_reference_is_up_to_date(generator):
    assert generator.out_of_date() == [], "run `make docs`"


def test_everything_in_the_reference_has_a_docstring(generator):
    assert generator.undocumented() == []


def test_the_reference_knows_every_public_name(generator):
    import torch_shard

    titles = {entry.title for page in generator.pages() for entry in page.entries}
    missing = [
        n
        for n in torch_shard.__all__
        if n not in ("__version__", "errors", "optim", "optim_state") and f"torch_shard.{n}" not in titles
    ]
    assert [n for n in missing if not hasattr(errors, n)] == []
    for module in ("optim", "optim_state", "state_dict_type"):
        public = importlib.import_module(f"torch_shard.{module}")
        own = [n for n in public.__all__ if inspect.isfunction(getattr(public, n))]
        assert [n for n in own if f"torch_shard.{module}.{n}" not in titles] == []


def test_docstrings_become_markdown(generator):
    text = generator.markdown(
        """Do ``it`` with :class:`~a.b.C`.

        Args:
            one: the first,
                longer.
            two, three: the others.

        Like this::

            do(1)

        Not collective.
        """
    )
    assert text == (
        "Do `it` with `C`.\n\n**Arguments**\n\n- `one`: the first,\n  longer.\n- `two`, `three`: the others.\n\n"
        "Like this:\n\n```\ndo(1)\n```\n\nNot collective."
    )


@pytest.mark.parametrize("name", errors.__all__)
def test_troubleshooting_has_an_entry_for_every_error(name):
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    assert found, name
    for part in ("```", "**Cause.**", "**Remedy.**"):
        assert part in found[1], f"{name}: no {part}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}"


def test_the_commands_of_the_readme_are_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    asked = set(re.findall(r"\bmake ([a-z][\w-]*)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert asked
    assert asked <= targets, asked - targets


def test_the_tests_that_the_comparison_names_exist():
    sources = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").glob("**/test_*.py"))
    text = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", text)
    assert named
    assert [n for n in named if f"def {n}(" not in sources] == []
    assert all((ROOT / "tests" / path).exists() for path in re.findall(r"`(\w+/test_\w+\.py)`", text))


def test_the_python_of_the_pages_is_python():
    for page in PAGES:
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S):
            compile(code, str(page), "exec")
