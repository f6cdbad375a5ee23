"""How programs are found, started and compared."""
