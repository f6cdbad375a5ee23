"""Mutation test of the engine: what do the tests fail to notice?

    make mutants                              # all steps, going on where an interrupted run stopped
    python -m tools.mutants STEP... [--only 003,017] [--again] [--lanes 2]

A mutant is the engine with one small fault: a condition dropped, a sign or a comparison turned, a statement deleted. Cosmic Ray
makes them (its operators, its session database, its run of one mutant); what is here chooses mutants and tests. A fixed number
is drawn, with a fixed seed, from the parts of the engine that settings.py lists. Each mutant meets the tests that reach its
line, until one fails. The steps:

    record      runs the quick tests once under coverage, to know which test reaches which line (subprocesses and ranks included)
    draw        chooses the mutants
    quick       runs each mutant against the quick tests that reach it
    exhaustive  records the exhaustive tests, too, and runs the mutants that are left against them
    confirm     runs every test that killed a mutant once more without any: one that fails then has killed nothing
    report      prints what became of each mutant (also into report.md), and which tests could change sets

Everything lives in build/mutants (or in the folder that MUTANTS_BUILD names): `tree`, a copy of the checkout whose tests are
recorded; `tree-1` and so on, the copies that are mutated; Cosmic Ray's sessions; the coverage. All of it is kept from run to run
while the mutated sources stay the same; a change in them begins anew. After a change of the tests, `--again` runs the mutants
that had survived once more; only changed test files are recorded again. (A change in a helper of the tests is not seen: remove
build/mutants/coverage then.) An interrupted run leaves a mutated copy behind, which the next start puts right.

Two mutants run side by side, since most tests wait a good deal. A run of the tests counts as hung where one test takes ten
times as long as it did under coverage, and at least three minutes; it must do so twice to count as a kill. Ranks that hang end
earlier, by the time limit of tests/support/ranks.py, which any test that it fails must fail twice, too.
"""
