"""Mistakes in how a version of the weights becomes bytes, travels, and becomes weights again."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(
    Mutant, folders=("tests/weights", "tests/rollout", "tests/engines", "tests/distributed", "tests/runtime")
)

WEIGHTS = (
    mutant(
        name="Only the size of a tensor's bytes is verified, not their checksum.",
        file="trainer/qwen35_trainer/weights/weight_buckets.py",
        old="if zlib.crc32(_part(entry, buckets)) != entry.checksum:",
        new="if _part(entry, buckets).size != entry.size:",
        killer="tests/weights/test_weight_buckets.py::test_one_damaged_byte_of_any_tensor_is_found",
    ),
    mutant(
        name="Of the buckets that arrive only their number is verified, not their sizes.",
        file="trainer/qwen35_trainer/weights/weight_buckets.py",
        old="if sizes != manifest.bucket_sizes:",
        new="if len(sizes) != len(manifest.bucket_sizes):",
        killer="tests/weights/test_weight_buckets.py::test_missing_and_cut_buckets_are_found",
    ),
    mutant(
        name="A bucket is closed after the tensor that passes its size, not before.",
        file="trainer/qwen35_trainer/weights/weight_buckets.py",
        old="if entries and start + data.size > BUCKET_BYTES:",
        new="if entries and start > BUCKET_BYTES:",
        killer="tests/weights/test_weight_buckets.py::test_a_bucket_is_closed_before_it_passes_its_size",
    ),
    mutant(
        name="A bucket is closed although the next tensor would fill it exactly.",
        file="trainer/qwen35_trainer/weights/weight_buckets.py",
        old="if entries and start + data.size > BUCKET_BYTES:",
        new="if entries and start + data.size >= BUCKET_BYTES:",
        killer="tests/weights/test_weight_buckets.py::test_a_bucket_is_closed_before_it_passes_its_size",
    ),
    mutant(
        name="The place of a tensor in its bucket is counted in elements, not in bytes.",
        file="trainer/qwen35_trainer/weights/weight_buckets.py",
        old="        filled = start + data.size\n        memory[start:filled] = data\n",
        new="        filled = start + tensor.numel()\n        memory[start : start + data.size] = data\n",
        killer="tests/weights/test_weight_buckets.py::test_what_is_packed_is_unpacked_in_every_dtype_and_shape",
    ),
    mutant(
        name="Buckets are stored when all are filled, from the memory that they share.",
        file="trainer/qwen35_trainer/weights/weight_buckets.py",
        old="for bucket, entries in _buckets(weights):",
        new="for bucket, entries in list(_buckets(weights)):",
        killer="tests/weights/test_weight_buckets.py::test_a_bucket_is_stored_before_the_tensors_of_the_next_are_asked_for",
    ),
    mutant(
        name="A replica copies a version, and the node holds its weights twice.",
        file="trainer/qwen35_trainer/weights/weight_buckets.py",
        old="data = torch.from_numpy(_part(entry, self._buckets))",
        new="data = torch.from_numpy(_part(entry, self._buckets).copy())",
        killer="tests/rollout/test_torch.py::test_a_replica_on_the_cpu_computes_with_the_buckets_themselves",
    ),
    mutant(
        name="Every bucket of a publication is the first one.",
        file="trainer/qwen35_trainer/weights/published.py",
        old="    return PublishedWeights(*pack(weights, version, store=ray.put))",
        new="    manifest, buckets = pack(weights, version, store=ray.put)\n"
        "    return PublishedWeights(manifest, buckets[:1] * len(buckets))",
        killer="tests/weights/test_published.py::test_every_bucket_is_put_once_and_in_order",
    ),
    mutant(
        name="The bucket after a tensor that is larger than a bucket has that one's number.",
        file="trainer/qwen35_trainer/weights/weight_buckets.py",
        old="            yield data, [entry]\n            number += 1\n",
        new="            yield data, [entry]\n",
        killer="tests/weights/test_weight_buckets.py::test_a_bucket_is_stored_before_the_tensors_of_the_next_are_asked_for",
    ),
    mutant(
        name="Adapters whose two factors have different ranks are taken for fitting.",
        file="trainer/qwen35_trainer/weights/adapters.py",
        old="if (out, columns, rank) == (rows, into, width):",
        new="if (out, columns) == (rows, into):",
        killer="tests/weights/test_adapters.py::test_what_does_not_fit_is_named_with_its_shapes",
    ),
)
