"""Mistakes in how a version of the weights becomes bytes, travels, and becomes weights again."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(
    Mutant, folders=("tests/weights", "tests/rollout", "tests/engines", "tests/distributed", "tests/runtime")
)

WEIGHTS = (
    mutant(
        name="Only the size of a part's bytes is verified, not their checksum.",
        file="trainer/qwen35_trainer/weights/host_weights.py",
        old="return data.size == part.size and checksum_of(data) == part.checksum",
        new="return data.size == part.size",
        killer="tests/weights/test_host_weights.py::test_one_damaged_byte_of_any_tensor_is_found_by_name",
    ),
    mutant(
        name="A part that was written twice is not noticed.",
        file="trainer/qwen35_trainer/weights/weight_manifest.py",
        old="        if part.start < end:\n",
        new="        if part.start < end - entry.size:\n",
        killer="tests/weights/test_weight_manifest.py::test_what_is_missing_or_doubled_is_named",
    ),
    mutant(
        name="The place of a part is counted in elements, not in bytes.",
        file="trainer/qwen35_trainer/weights/staging.py",
        old="piece.start * item, piece.size * item, values",
        new="piece.start, piece.size * item, values",
        killer="tests/weights/test_transports.py::test_every_bit_arrives_in_the_type_that_is_published",
    ),
    mutant(
        name="A segment is written although a replica still reads it.",
        file="trainer/qwen35_trainer/weights/segment.py",
        old="if segment.version in needed or not segment.lock_for_writing():",
        new="if segment.version in needed:",
        killer="tests/weights/test_segment.py::test_a_segment_that_is_read_is_not_written_and_the_next_one_is_another",
    ),
    mutant(
        name="A segment is written although a replica may still fetch its version.",
        file="trainer/qwen35_trainer/weights/segment.py",
        old="if segment.version in needed or not segment.lock_for_writing():",
        new="if not segment.lock_for_writing():",
        killer="tests/weights/test_segment.py::test_a_version_that_somebody_may_still_fetch_is_not_written_although_nobody_reads_it",
    ),
    mutant(
        name="A replica does not keep the segment that it reads from being written.",
        file="trainer/qwen35_trainer/weights/host_weights.py",
        old="memory = segment.read()",
        new="memory = segment.data",
        killer="tests/weights/test_transports.py::test_readers_at_different_paces_keep_the_version_that_each_holds",
    ),
    mutant(
        name="A replica copies a version, and the node holds its weights twice.",
        file="trainer/qwen35_trainer/weights/host_weights.py",
        old="tensor_of(_bytes(entry, self._memory), entry.dtype)",
        new="tensor_of(_bytes(entry, self._memory).copy(), entry.dtype)",
        killer="tests/rollout/test_torch.py::test_a_replica_on_the_cpu_computes_with_the_published_bytes_themselves",
    ),
    mutant(
        name="A bucket is closed although the next part would fill it exactly.",
        file="trainer/qwen35_trainer/weights/shard_streams.py",
        old="if self._parts and self._next + size > self._memory.size:",
        new="if self._parts and self._next + size >= self._memory.size:",
        killer="tests/weights/test_object_store.py::test_no_bucket_is_larger_than_its_limit_and_each_is_full_before_the_next",
    ),
    mutant(
        name="Changes are applied to any version that a replica has.",
        file="trainer/qwen35_trainer/weights/shard_streams.py",
        old="if step.base == before.version:",
        new="if step.base is not None:",
        killer="tests/weights/test_shard_streams.py::test_a_replica_has_the_same_version_whatever_it_had",
    ),
    mutant(
        name="Adapters whose two factors have different ranks are taken for fitting.",
        file="trainer/qwen35_trainer/weights/adapters.py",
        old="if (out, columns, rank) == (rows, into, width):",
        new="if (out, columns) == (rows, into):",
        killer="tests/weights/test_adapters.py::test_what_does_not_fit_is_named_with_its_shapes",
    ),
)
