"""The cases of bench/compare.py: importing this folder registers them, in the order of the table."""

from importlib import import_module

for _name in ("steps", "forwards", "weights", "graphs", "modules", "building", "optimizers", "alone", "refused"):
    import_module(f"{__name__}.{_name}")
