"""Quick checks of a manifest before Ray starts, which take a second or two.

    unsupported     what `qwen35 run` cannot do on this machine, or anywhere in this release
    untransported   why weights cannot get to the replicas by the manifest's transport
    problems_of     functions, paths and names in the manifest that cannot be used
    problem_of      why a function of the user cannot be used, without an import of its module

prepare.py checks the rows of the data and everything that needs a tokenizer, which takes longer.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from qwen35_trainer.catalog.model_sizes import ModelSizes, positions_of
from qwen35_trainer.data.prompt_files import misnamed
from qwen35_trainer.manifest import Manifest, ManifestError, Problem, RandomModelSpec, TrainingSpec, cannot_run
from qwen35_trainer.manifest.problems import did_you_mean
from qwen35_trainer.manifest.release import VLLM_CPU_HEADS, experts_with_adapters
from qwen35_trainer.manifest.train import LINEAR_LAYERS, RouterSpec
from qwen35_trainer.manifest.vllm_split import DividedSizes, split_problems
from qwen35_trainer.models.qwen3_5 import prediction_head, qwen3_moe
from qwen35_trainer.models.qwen3_5.linear_layers import linear_layers
from qwen35_trainer.models.qwen3_5.model_files import (
    FileProblem,
    FileUnusable,
    pointer_problem,
    read_headers,
    read_mapping,
)
from qwen35_trainer.models.qwen3_5.model_types import family_problem
from qwen35_trainer.planning.known_sizes import known_sizes
from qwen35_trainer.planning.model_limits import LONGER_ANYWAY, context_problems, degree_problems
from qwen35_trainer.rewards.scorer import function_errors
from qwen35_trainer.weights.transports import choose

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Pattern of a model's name on the Hugging Face hub: OWNER/MODEL."""
HUB_HEADS = {"head_dim": "headDim", "linear_key_head_dim": "linearHeadDim", "linear_value_head_dim": "linearHeadDim"}
"""Field of config.json → the field of `model.source.random` with the same meaning."""
MODEL_FILES = ("config.json", "tokenizer_config.json")
FUNCTION_FIXES = {
    "NoModule": "Correct the name, put the module next to the manifest, or put its folder on PYTHONPATH.",
    "ImportFailed": "Correct the module, or install what it imports.",
    "NoFunction": "Name a function of that module.",
    "WrongParameters": "Let it take (prompt, response, answer, metadata), and score one response.",
}


def unsupported(manifest: Manifest) -> list[Problem]:
    """Return a problem for each part of the manifest that `qwen35 run` does not support here or in this release."""
    spec = manifest.spec
    problems: list[Problem] = []

    def refuse(path: str, message: str, fix: str) -> None:
        problems.append(Problem(f"spec.{path}", message, fix))

    if spec.suspend:
        refuse("suspend", "the training is suspended.", "Set it to false.")
    if spec.model.source.persistentVolumeClaim is not None:
        claim = spec.model.source.persistentVolumeClaim.claimName
        refuse(
            "model.source.persistentVolumeClaim",
            f"{claim} is mounted only in a cluster.",
            "Use source.path with a folder, or source.random.",
        )
    storage = spec.checkpoint.storage
    if storage is not None and storage.persistentVolumeClaim is not None:
        refuse(
            "checkpoint.storage.persistentVolumeClaim",
            f"{storage.persistentVolumeClaim.claimName} is mounted only in a cluster.",
            "Use storage.path, or leave storage out to save into the output folder.",
        )
    for name, sources in (("train", spec.data.train), ("validation", spec.data.validation)):
        for index, source in enumerate(sources):
            if source.files is not None and source.files.volume is not None:
                refuse(
                    f"data.{name}[{index}].files.volume",
                    "a volume is mounted only in a cluster.",
                    "Remove it and name local files in paths.",
                )
    return problems + cannot_run(spec)


def untransported(spec: TrainingSpec, *, one_host: bool) -> list[Problem]:
    """Return a problem if `publication.transport` cannot work in this run; otherwise an empty list.

    one_host: whether all processes of the run are on one machine and not in pods, so that they can share memory.
    """
    try:
        choose(spec.publication.transport, one_host=one_host)
    except ManifestError as error:
        return list(error.problems)
    return []


def problems_of(spec: TrainingSpec, base: Path) -> list[Problem]:
    """Return a problem for each function, path and name in a spec that cannot be used.

    base: the manifest's folder, to which paths are relative.
    """
    return [
        *_rewards(spec, base),
        *_algorithm(spec, base),
        *_data(spec, base),
        *_model(spec, base),
        *_lora(spec, base),
        *_router(spec, base),
        *_prediction_head(spec, base),
        *_degrees(spec, base),
        *_quantization(spec, base),
        *_vllm_on_cpu(spec, base),
        *_vllm_on_ascend(spec, base),
        *_vllm_split(spec, base),
        *_vllm_positions(spec, base),
    ]


def _rewards(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    for index, error in function_errors(spec.rewards, base).items():
        fix = FUNCTION_FIXES.get(error.kind, "Let the module load in time, and without ending its process.")
        yield Problem(f"spec.rewards[{index}].function", f"{str(error).rstrip('.')}.", fix)


def _algorithm(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    if spec.mode == "SFT":
        return
    for path, target in spec.algorithm.own_functions.items():
        if (problem := problem_of(target, base)) is not None:
            yield Problem(f"spec.algorithm.{path}", *problem)


def _data(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    for part, sources in (("train", spec.data.train), ("validation", spec.data.validation)):
        for index, source in enumerate(sources):
            if source.files is not None:
                for message, fix in misnamed(source.files, base):
                    yield Problem(f"spec.data.{part}[{index}].files", message, fix)


def _model(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    if (path := spec.model.source.path) is None:
        return
    folder, place = base / path, "spec.model.source.path"
    if not folder.is_dir():
        fix = "Give the folder of a Hugging Face checkpoint; a relative path starts at the manifest's folder."
        if HUB_NAME.fullmatch(path):
            local = f"models/{path.rpartition('/')[2]}"
            fix = (
                f"Names of the hub are not downloaded. Run `hf download {path} --local-dir {base / local}` first, "
                f"and set path to {local}."
            )
        yield Problem(place, f"the folder {folder} does not exist.", fix)
    elif missing := [name for name in MODEL_FILES if not (folder / name).is_file()]:
        entries = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
        fix = "Give the folder of a Hugging Face checkpoint, with its configuration, its tokenizer and its weights."
        yield Problem(place, f"{folder} has no {' and no '.join(missing)} (found: {entries}).", fix)
    if folder.is_dir():
        for problem in _files(folder):
            yield Problem(place, problem.message, problem.fix)
    if (config := _configuration(spec, base)) is not None and (message := family_problem(config)) is not None:
        yield Problem(place, message, "Give the folder of a supported model, whose config.json has these values.")


def _files(folder: Path) -> Iterator[FileProblem]:
    """Yield a problem for each file of a model's folder that is damaged, and for each file of weights that is missing."""
    for name in MODEL_FILES:
        try:
            if (folder / name).is_file():
                read_mapping(folder / name)
        except FileUnusable as error:
            yield error.problem
    if (problem := pointer_problem([folder / "tokenizer.json"])) is not None:
        yield problem
    yield from read_headers(folder).problems


def _lora(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    lora, config = spec.train.lora, _configuration(spec, base)
    if (
        lora is None or config is None or lora.targets == LINEAR_LAYERS
    ):  # a model need not have all layers of the default
        return
    layers = linear_layers(config)
    for index, target in enumerate(lora.targets):
        if target not in layers:
            message = f"no linear layer of the decoder is called {target}."
            yield Problem(f"spec.train.lora.targets[{index}]", message, did_you_mean(target, layers))


def _router(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    router, config = spec.train.router, _configuration(spec, base)
    if config is None or router == RouterSpec() or "moe" in str(config.get("model_type")):
        return
    if router.replay:
        yield Problem(
            "spec.train.router.replay", "this model has no router whose choices could be replayed.", "Remove it."
        )
    if router.loadBalancingLoss or router.zLoss:
        yield Problem("spec.train.router", "this model has no router.", "Remove its losses.")


def _prediction_head(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    config = _configuration(spec, base)
    if config is None or spec.train.multiTokenPrediction is None:
        return
    text = config.get("text_config", config)
    for message, fix in prediction_head.problems(text if isinstance(text, Mapping) else {}):
        yield Problem("spec.train.multiTokenPrediction", message, fix)


def _degrees(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    """Yield a problem for each degree of train.parallelism that does not divide the model.

    Yields nothing for a config.json that `_model` refuses, or whose sizes cannot be read.
    """
    shape = known_sizes(spec.model) if spec.model.source.random is not None else _sizes(spec, base)
    if shape is not None:
        yield from degree_problems(shape, spec)


def _sizes(spec: TrainingSpec, base: Path) -> ModelSizes | None:
    """Return the sizes of a model in a folder, or None if its config.json does not describe them."""
    config = _configuration(spec, base)
    if config is None or family_problem(config) is not None:
        return None
    try:
        return ModelSizes.of_config(config)
    except (KeyError, TypeError, ValueError):
        return None


def _quantization(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    config = _configuration(spec, base)
    if config is not None and (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        message = f"its weights are quantised ({method or 'quantization_config in config.json'}), and this release trains BF16 or FP32."
        yield Problem("spec.model.source.path", message, "Use the folder of the same model without quantisation.")


def _vllm_on_cpu(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    """Yield a problem for each part of a model that vLLM does not support on the CPU.

    vLLM does not support some sizes of attention heads, and experts with adapters. Only models in a folder are checked
    here. `cannot_run` checks random models.
    """
    on_cpu = spec.accelerator.profile == "CPU"
    if spec.rollout is None or spec.rollout.engine != "VLLM" or not on_cpu or spec.model.source.random is not None:
        return
    config = _configuration(spec, base) or {}
    text = config.get("text_config", config)
    for name, part in HUB_HEADS.items():
        size, sizes = text.get(name) if isinstance(text, Mapping) else None, VLLM_CPU_HEADS[part]
        if size is not None and size not in sizes:
            message = f"{name} in config.json is {size}, and vLLM's CPU kernels have {', '.join(map(str, sizes))}."
            yield Problem("spec.model.source.path", message, "Use another model, or set rollout.engine to Torch.")
    if spec.train.lora is not None and "moe" in str(config.get("model_type")):
        yield experts_with_adapters()


def _vllm_on_ascend(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    """Yield a problem if a model in a folder lacks the sections of positions, which vllm-ascend's attention of Qwen3.5 reads.

    `cannot_run` refuses random models, which lack them, too. Models of Qwen3 have one position for each token, and need none.
    """
    on_ascend = spec.accelerator.profile == "Ascend"
    if spec.rollout is None or spec.rollout.engine != "VLLM" or not on_ascend or spec.model.source.random is not None:
        return
    config = _configuration(spec, base)
    if config is None or config.get("model_type") == qwen3_moe.MODEL_TYPE:  # whose tokens have one position each
        return
    text = config.get("text_config", config)
    positions = text.get("rope_parameters") if isinstance(text, Mapping) else None
    if not isinstance(positions, Mapping) or not positions.get("mrope_section"):
        message = "rope_parameters in config.json has no mrope_section, which vllm-ascend needs."
        fix = "Copy rope_parameters from config.json of the published model, or set rollout.engine to Torch."
        yield Problem("spec.model.source.path", message, fix)


def _vllm_split(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    """Yield a problem if vLLM cannot divide a model in a folder among the devices of a replica.

    `cannot_run` checks random models.
    """
    if spec.model.source.random is None and (config := _configuration(spec, base)) is not None:
        text = config.get("text_config", config)
        yield from split_problems(spec, DividedSizes.of_configuration(text if isinstance(text, Mapping) else {}))


def _vllm_positions(spec: TrainingSpec, base: Path) -> Iterator[Problem]:
    """Yield a problem if a prompt and its response can be longer than vLLM allows for a model in a folder."""
    config = _configuration(spec, base)
    if config is not None and not os.environ.get(LONGER_ANYWAY):
        yield from context_problems(spec, positions_of(config))


def _configuration(spec: TrainingSpec, base: Path) -> Mapping[str, Any] | None:
    """Return the contents of the model's config.json, or the same fields for a random model.

    None if config.json cannot be read.
    """
    source = spec.model.source
    if source.random is not None:
        return _random_configuration(source.random)
    if source.path is None:
        return None
    try:
        config = json.loads((base / source.path / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # `_files` reports what is wrong with the file
    if not isinstance(config, dict):
        return None
    if config.get("model_type") == qwen3_moe.MODEL_TYPE and (count := qwen3_moe.experts(config)) is not None:
        return config | {"num_experts": count}
    return config


def _random_configuration(shape: RandomModelSpec) -> Mapping[str, Any]:
    return {
        "model_type": "qwen3_5_moe_text" if shape.experts else "qwen3_5_text",
        "num_hidden_layers": shape.layers,
        "full_attention_interval": shape.fullAttentionInterval,
    }


def problem_of(target: str, base: Path) -> tuple[str, str] | None:
    """Return (problem, fix) for a user's function, or None if no problem is found. The module is not imported.

    target: the function, as `module:function`. base: the manifest's folder, in which modules are searched first. An
    import could import torch, which takes seconds. The result is therefore also None where only an import would show
    the problem: for a compiled module, a custom finder, a star import or a module's `__getattr__`.
    """
    module, _, name = target.partition(":")
    spec, first = _found(module, [str(base), *sys.path]), module.partition(".")[0]
    if first in sys.stdlib_module_names and _found(first, [str(base)]) is not None:
        # Python has imported its own module, or would import this one instead of it.
        return f"{target}: Python's library has a module {first} too.", "Rename yours."
    if spec is None:
        if _found_elsewhere(module):
            return None
        fix = "Correct the name, put the module next to the manifest, or put its folder on PYTHONPATH."
        return f"{target}: module {module} was not found in the manifest's folder {base} or on sys.path.", fix
    file = Path(spec.origin or "")
    if file.suffix != ".py":
        return None
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        return f"{target}: {file}, line {error.lineno}: {error.msg}.", "Correct the module."
    defined = dict(_bound(tree.body))
    if name in defined:
        return _not_of_one(target, defined[name])
    if defined.keys() & {"*", "__getattr__"}:
        return None
    return f"{target}: {file} has no {name}.", did_you_mean(name, defined or ["no function"])


def _found(module: str, path: Sequence[str]) -> ModuleSpec | None:
    """Find a module as an import would, package by package, without importing it. None if the module is not found.

    path: the folders in which the first package is searched.
    """
    spec: ModuleSpec | None = None
    for number, _ in enumerate(module.split("."), start=1):
        spec = PathFinder.find_spec(".".join(module.split(".")[:number]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _found_elsewhere(module: str) -> bool:
    """Return whether a finder of an installed package (`sys.meta_path`) finds the first package of a module."""
    own = (BuiltinImporter, FrozenImporter, PathFinder)
    first = module.partition(".")[0]
    return any(finder.find_spec(first, None) is not None for finder in sys.meta_path if finder not in own)


def _bound(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield (name, syntax node that defines it) for each name that a module defines outside of functions and classes."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in names)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value):
                yield name, value
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node
            case _:
                yield from _bound(ast.iter_child_nodes(node))


def _not_of_one(target: str, node: ast.AST) -> tuple[str, str] | None:
    """Return (problem, fix) if `node` defines something that certainly cannot be called with one argument.

    Otherwise return None. target: name of the function, for the message.
    """
    match node:
        case ast.Constant():
            return f"{target} is {ast.unparse(node)}.", "Name a function."
        case ast.AsyncFunctionDef(decorator_list=[]):
            return f"{target} is a coroutine function.", "Define it with def."
        case ast.FunctionDef(decorator_list=[], args=arguments):
            positional = len(arguments.posonlyargs) + len(arguments.args)
            required = positional - len(arguments.defaults)
            keywords = sum(default is None for default in arguments.kw_defaults)
            if required > 1 or keywords or not (positional or arguments.vararg):
                shown = f"{target}({ast.unparse(arguments)})"
                return f"{shown} cannot be called with one argument.", "Let it take the inputs alone."
    return None
