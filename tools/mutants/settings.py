"""What is mutated, and how much of it. The only file to change when sources move."""

from __future__ import annotations

SEED = 1
COUNT = 120  # mutants, the same number from each part

ENGINE = "core/torch_shard"
PACKAGES = (ENGINE, "lightning_shard", "accelerate_shard")  # of which it is recorded which lines each test reaches

# The hot and the dangerous parts, as globs under ENGINE. A part says which files hold it; it may hold any number.
PARTS: dict[str, tuple[str, ...]] = {
    "schedule": ("schedule.py", "order.py"),
    "runtime": ("runtime.py", "forwards.py", "hooks.py", "use.py", "on_demand.py"),
    "reductions": ("reductions.py", "reduction.py"),
    "unit": ("unit.py",),
    "buffers": ("flat_buffer.py", "gradient_buffer.py", "unfinished.py", "buffers.py"),
    "collectives": ("collectives.py", "watch.py", "group_calls.py", "quantized_transfers.py"),
    "agreement": ("agreement.py", "together.py", "meeting.py"),
    "shard tensors": ("shard_*.py", "leaf.py"),
    "optimizer steps": (
        "flat_step.py",
        "flat_runs.py",
        "matrix_step.py",
        "in_backward.py",
        "optim_step.py",
        "counters.py",
    ),
    "clipping": ("clip.py", "clip_together.py", "unit_norms.py"),
    "checkpoint reading": (
        "checkpoint/reader.py",
        "checkpoint/opened.py",
        "checkpoint/sharded_load.py",
        "checkpoint/full_load.py",
        "checkpoint/load_optimizer.py",
        "checkpoint/read_contents.py",
    ),
    "checkpoint writing": (
        "checkpoint/writer.py",
        "checkpoint/stream.py",
        "checkpoint/sharded_save.py",
        "checkpoint/full_save.py",
        "checkpoint/save_plan.py",
        "checkpoint/staging.py",
    ),
}

# Cosmic Ray's operators: of the many ways to replace one, those that negate, move a boundary or turn a sign.
OPERATORS = (
    r"shard/.*",  # those of operators.py
    r"core/(AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd)",
    r"core/(ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop|ExceptionReplacer|RemoveDecorator)",
    r"core/NumberReplacer",
    r"core/ReplaceUnaryOperator_(Delete_Not|USub_UAdd|Delete_Invert)",
    r"core/ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt)",
    r"core/ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|Div_Mul|Mod_FloorDiv|Pow_Mul)",
    r"core/ReplaceBinaryOperator_(BitOr_BitAnd|BitAnd_BitOr|RShift_LShift|LShift_RShift)",
)

# Other numbers are sizes, seconds and multipliers: one more of them is no other promise.
NUMBERS = ("0", "1", "2")

# Names of tests that compare training on several ranks with plain training. Most mutants change what they compare.
COMPARES = r"(like_(the_)?plain|(under|with|of|as)_ddp|as_plain|_exact).*[2-8]ranks"

SLOWER = 10.0  # than when it was recorded: a test that takes this much longer hangs ...
AT_LEAST = 180.0  # ... but not before this many seconds
BATCH = 5  # tests of a mutant's first run of pytest, which collects their files only; the next has eight times as many
START = 600.0  # seconds for pytest to import and collect
