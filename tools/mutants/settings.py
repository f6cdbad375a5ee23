"""What is mutated, and how much of it. The only file to change when sources move."""

from __future__ import annotations

SEED = 1
COUNT = 120  # mutants, the same number from each part

ENGINE = "core/torch_shard"
PACKAGES = (ENGINE, "lightning_shard", "accelerate_shard")  # of which it is recorded which lines each test reaches

# The hot and the dangerous parts, as globs under ENGINE. A part says which files hold it; it may hold any number.
PARTS: dict[str, tuple[str, ...]] = {
    "schedule": ("schedule/*.py",),
    "runtime": (
        "runtime/runtime.py",
        "runtime/session.py",
        "runtime/backwards.py",
        "runtime/forward_hooks.py",
        "runtime/backward_inputs.py",
        "runtime/on_demand.py",
    ),
    "reductions": ("runtime/reduce_schedule.py", "comm/gradient_reduction.py"),
    "unit": ("unit/unit.py", "unit/references.py"),
    "buffers": (
        "unit/flat_buffer.py",
        "unit/gradient_buffer.py",
        "unit/accumulation.py",
        "unit/gradient_hooks.py",
        "unit/held_gradients.py",
        "unit/shard_reads.py",
        "comm/broadcast_buffers.py",
        "runtime/buffer_sync.py",
    ),
    "collectives": (
        "comm/collectives.py",
        "comm/collective_steps.py",
        "comm/watchdog.py",
        "comm/work.py",
        "comm/process_group_ops.py",
        "comm/quantized_collectives.py",
    ),
    "agreement": (
        "comm/divergence.py",
        "comm/comparisons.py",
        "comm/consensus.py",
        "comm/multi_engine_order.py",
        "comm/one_sided/*.py",
        "runtime/barrier.py",
        "runtime/lone_reads.py",
    ),
    "shard tensors": ("shard_tensor/*.py",),
    "optimizer steps": (
        "optim/elementwise/step.py",
        "optim/elementwise/runs.py",
        "optim/elementwise/step_counters.py",
        "optim/matrix/*.py",
        "optim/step_in_backward.py",
        "optim/step_watch.py",
    ),
    "clipping": ("grad_clip/*.py", "frontend/clipping.py"),
    "checkpoint reading": (
        "checkpoint/sharded/reader.py",
        "checkpoint/sharded/load.py",
        "checkpoint/sharded/load_optimizer.py",
        "checkpoint/sharded/read_tree.py",
        "checkpoint/sharded/saved_model.py",
        "checkpoint/sharded/entry_tree.py",
        "checkpoint/full/load.py",
    ),
    "checkpoint writing": (
        "checkpoint/sharded/writer.py",
        "checkpoint/sharded/save.py",
        "checkpoint/sharded/save_plan.py",
        "checkpoint/sharded/host_snapshot.py",
        "checkpoint/full/save.py",
        "checkpoint/full/stream.py",
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
