"""Mistakes in how a version of the weights becomes bytes, travels, and becomes weights again."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(Mutant, folders=("tests/weights", "tests/rollout", "tests/engines", "tests/runtime"))

WEIGHTS = (
    mutant(
        name="Only the size of a tensor's bytes is verified, not their checksum.",
        file="trainer/qwen35_trainer/weights/snapshot.py",
        old="if zlib.crc32(data) != entry.checksum:",
        new="if data.size != entry.size:",
        killer="tests/weights/test_snapshot.py::test_one_damaged_byte_anywhere_is_found",
    ),
    mutant(
        name="Of the buckets that arrive only their number is verified, not their sizes.",
        file="trainer/qwen35_trainer/weights/snapshot.py",
        old="if sizes != manifest.bucket_sizes:",
        new="if len(sizes) != len(manifest.bucket_sizes):",
        killer="tests/weights/test_snapshot.py::test_missing_and_cut_buckets_are_found",
    ),
    mutant(
        name="A bucket is closed after the tensor that passes its size, not before.",
        file="trainer/qwen35_trainer/weights/snapshot.py",
        old="if members and filled + size > BUCKET_BYTES:",
        new="if members and filled > BUCKET_BYTES:",
        killer="tests/weights/test_snapshot.py::test_a_bucket_is_closed_before_it_passes_its_size",
    ),
    mutant(
        name="A bucket is closed although the next tensor would fill it exactly.",
        file="trainer/qwen35_trainer/weights/snapshot.py",
        old="if members and filled + size > BUCKET_BYTES:",
        new="if members and filled + size >= BUCKET_BYTES:",
        killer="tests/weights/test_snapshot.py::test_a_bucket_is_closed_before_it_passes_its_size",
    ),
    mutant(
        name="The place of a tensor in its bucket is counted in elements, not in bytes.",
        file="trainer/qwen35_trainer/weights/snapshot.py",
        old="            offset += data.size\n",
        new="            offset += tensor.numel()\n",
        killer="tests/weights/test_snapshot.py::test_what_is_packed_is_unpacked_in_every_dtype_and_shape",
    ),
    mutant(
        name="A tensor that fills a bucket alone is published without being copied.",
        file="trainer/qwen35_trainer/weights/snapshot.py",
        old="        buckets.append(bucket)\n",
        new="        buckets.append(bucket if len(members) > 1 else _bytes(members[0][1]))\n",
        killer="tests/weights/test_snapshot.py::test_the_copy_stays_when_the_live_weights_change",
    ),
    mutant(
        name="Unpacked tensors share the memory of the buckets that other replicas read.",
        file="trainer/qwen35_trainer/weights/snapshot.py",
        old="        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))\n"
        "        np.copyto(_bytes(tensor), data)\n",
        new="        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))\n"
        "        if data.size:\n"
        "            tensor = torch.from_numpy(data).view(tensor.dtype).view(tensor.shape)\n",
        killer="tests/weights/test_snapshot.py::test_unpacked_tensors_have_memory_of_their_own",
    ),
    mutant(
        name="Every bucket of a publication is the first one.",
        file="trainer/qwen35_trainer/weights/object_store.py",
        old="tuple(ray.put(bucket) for bucket in buckets)",
        new="(ray.put(buckets[0]),) * len(buckets)",
        killer="tests/weights/test_object_store.py::test_every_bucket_is_put_once_and_in_order",
    ),
    mutant(
        name="What adapters add is rounded to the type of the weights before it is added.",
        file="trainer/qwen35_trainer/weights/adapters.py",
        old="(weight.float() + scale * (up @ down)).to(weight.dtype)",
        new="weight + (scale * (up @ down)).to(weight.dtype)",
        killer="tests/weights/test_adapters.py::test_the_sum_is_made_in_float32_and_rounded_once",
    ),
    mutant(
        name="Adapters whose two factors have different ranks are taken for fitting.",
        file="trainer/qwen35_trainer/weights/adapters.py",
        old="if (out, columns, rank) == (rows, into, width):",
        new="if (out, columns) == (rows, into):",
        killer="tests/weights/test_adapters.py::test_what_does_not_fit_is_named_with_its_shapes",
    ),
)
