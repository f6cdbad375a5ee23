"""Other people's programs, byte for byte, under DDP and under this package: ``make outside``.

A program is one :class:`~tests.outside.support.program.Program`, an entry of a table in a file ``test_<project>.py``. It says
where the program's source is, its arguments, the switch (how it is started under DDP, and how under this package), and what
stands in for data and pretrained files. The harness runs it in two folders, records the loss of every backward on every rank,
and compares losses and all files that the two runs have left. To add one:

1.  Name the source: ``Outside`` (below the folder that the variable ``OUTSIDE`` names), ``Fetched`` (a public repository below
    ``OUTSIDE_SOURCES``), ``Copied`` (one that writes beside itself), ``Packaged`` (inside an installed package) or ``Own`` (a
    script of ours that uses their library). Where it is not to be had the test is skipped with the reason. A digest says that
    nobody has edited it.
2.  Make its data in ``prepare``, a function of a folder; arguments refer to that folder as ``{data}``. Make models tiny. Both
    runs start in an empty folder of their own, so let the program write to a relative path.
3.  A stand-in is a file in ``stand_ins`` that ``Program.stand_ins`` names. It replaces data, the hub or a device that is not
    there, never a line of the program, and is loaded in the DDP run, too. ``in_process/sitecustomize.py`` says what it has.
4.  Files that can't be equal (times in them) go into ``not_compared``, with the reason. A program that this package refuses
    says so in ``refused``, by a piece of the error's text. ``Tolerance()`` is rounding; what needs more says why.
5.  Run it: ``make outside ARGS="-k name"``. Both runs' output and files stay below pytest's temporary folder.
"""
