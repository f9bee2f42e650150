"""The arithmetic of devices: exactly the whole divisions pass, and what a fix says is right."""

import copy
import re

from hypothesis import assume, given
from hypothesis import strategies as st

from qwen35_trainer.manifest import TrainingSpec, layout

SIZE = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
NODES = st.integers(1, 12)
DEVICES = st.sampled_from([1, 2, 4, 8, 16])
BASE = {
    "model": {"name": "tiny", "source": {"random": {}}},
    "data": {"train": [{"name": "a", "gym": {"task": "chain_sum", "size": 8}}]},
    "rewards": [{"type": "Gym"}],
    "rollout": {},
}


def spec(**sections):
    return TrainingSpec.model_validate({**copy.deepcopy(BASE), **sections})


def trained(nodes, devices, batch=None, group=8, engine="FSDP", **parallelism):
    train = {"nodes": nodes, "parallelism": parallelism, "batch": batch or {}, "engine": engine}
    return spec(accelerator={"devicesPerNode": devices}, train=train, algorithm={"groupSize": group})


@given(nodes=NODES, devices=DEVICES, tensor=SIZE, pipeline=SIZE, context=SIZE)
def test_the_dense_layers_fit_exactly_when_the_division_is_whole(nodes, devices, tensor, pipeline, context):
    problems = list(layout.dense(trained(nodes, devices, tensor=tensor, pipeline=pipeline, context=context)))
    assert (problems == []) == (nodes * devices % (tensor * pipeline * context) == 0)


@given(nodes=NODES, devices=DEVICES, expert=SIZE, size=SIZE, pipeline=SIZE)
def test_the_experts_of_megatron_fit_exactly_when_the_division_is_whole(nodes, devices, expert, size, pipeline):
    sizes = {"expert": expert, "expertTensor": size, "pipeline": pipeline}
    problems = list(layout.expert(trained(nodes, devices, engine="Megatron", **sizes)))
    assert (problems == []) == (expert == 1 or nodes * devices % (expert * size * pipeline) == 0)


@given(nodes=NODES, devices=DEVICES, expert=SIZE, copies=SIZE)
def test_the_experts_of_fsdp_fit_exactly_when_each_copy_has_all(nodes, devices, expert, copies):
    problems = list(layout.expert(trained(nodes, devices, expert=expert, copies=copies)))
    assert (problems == []) == (expert == 1 or nodes * devices % (expert * copies) == 0)


@given(devices=SIZE, experts=st.integers(0, 40))
def test_devices_divide_experts_exactly_when_each_has_the_same_number(devices, experts):
    problem = layout.expert_problem(devices, experts)
    assert (problem is None) == (devices == 1 or (experts > 0 and experts % devices == 0))
    for size in re.findall(r"\d+", problem.fix) if problem else ():
        assert layout.expert_problem(int(size), experts) is None


@given(nodes=NODES, devices=DEVICES, copies=SIZE, context=SIZE)
def test_copies_fit_exactly_when_each_has_whole_sequences(nodes, devices, copies, context):
    problems = list(layout.copies(trained(nodes, devices, copies=copies, context=context)))
    assert (problems == []) == (copies == 1 or nodes * devices % (copies * context) == 0)
    fix = re.match(r"Use (\w+) ((?:\d+(?: or )?)+)", problems[0].fix) if problems else None
    for size in re.findall(r"\d+", fix[2]) if fix else ():
        mended = {"copies": copies, "context": context, fix[1]: int(size)}
        assert list(layout.copies(trained(nodes, devices, **mended))) == []


@given(nodes=NODES, devices=DEVICES, tensor=SIZE, pipeline=SIZE, context=SIZE)
def test_each_fix_of_a_layout_mends_it(nodes, devices, tensor, pipeline, context):
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context}
    problems = list(layout.dense(trained(nodes, devices, **sizes)))
    assume(problems)
    if more := re.search(r"(\d+) nodes?", problems[0].fix):
        assert list(layout.dense(trained(int(more[1]), devices, **sizes))) == []
    if axis := re.match(r"Use (\w+) ((?:\d+(?: or )?)+)", problems[0].fix):
        for size in re.findall(r"\d+", axis[2]):
            assert list(layout.dense(trained(nodes, devices, **{**sizes, axis[1]: int(size)}))) == []


@given(nodes=NODES, devices=DEVICES, tensor=SIZE, prompts=st.integers(1, 64), group=st.integers(2, 12), micro=SIZE)
def test_a_batch_fits_exactly_when_every_rank_gets_whole_micro_batches(nodes, devices, tensor, prompts, group, micro):
    assume(nodes * devices % tensor == 0)
    ranks = nodes * devices // tensor
    batch = {"promptsPerUpdate": prompts, "microBatchSequences": micro}
    problems = list(layout.batch(trained(nodes, devices, batch, group, tensor=tensor)))
    assert (problems == []) == (prompts * group % (ranks * micro) == 0)
    for better in re.findall(r"\d+", problems[0].fix) if problems else []:
        mended = {**batch, "promptsPerUpdate": int(better)}
        assert list(layout.batch(trained(nodes, devices, mended, group, tensor=tensor))) == []


@given(nodes=NODES, devices=DEVICES, size=st.integers(1, 64))
def test_replicas_use_up_the_pool_and_share_no_node_by_halves(nodes, devices, size):
    problems = list(
        layout.replicas(spec(accelerator={"devicesPerNode": devices}, rollout={"nodes": nodes, "tensorParallel": size}))
    )
    within = size <= devices and devices % size == 0
    across = size > devices and size % devices == 0 and (nodes * devices) % size == 0
    assert (problems == []) == (within or across)
    for better in re.findall(r"\d+", problems[0].fix) if problems else []:
        rollout = {"nodes": nodes, "tensorParallel": int(better)}
        assert list(layout.replicas(spec(accelerator={"devicesPerNode": devices}, rollout=rollout))) == []


def test_the_message_has_the_numbers_and_the_fix():
    (problem,) = layout.dense(trained(2, 8, tensor=4, pipeline=3))
    assert problem.path == "spec.train.parallelism"
    assert problem.message == "tensor 4 × pipeline 3 × context 1 = 12 does not divide 2 nodes × 8 devices = 16."
    assert problem.fix == "Use pipeline 2 or 4, or 3 nodes."


def test_a_batch_is_reported_with_its_ranks():
    (problem,) = layout.batch(trained(1, 8, {"promptsPerUpdate": 7, "microBatchSequences": 2}, 5))
    assert problem.message == (
        "promptsPerUpdate 7 × groupSize 5 = 35 does not divide over 8 data-parallel ranks × microBatchSequences 2 = 16."
    )
    assert problem.fix == "Use promptsPerUpdate 16."
