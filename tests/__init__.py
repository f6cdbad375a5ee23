"""Tests. A package, so that rank processes can import a test module by its name."""
