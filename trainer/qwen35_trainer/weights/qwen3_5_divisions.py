"""Knows how vLLM's ranks divide the tensors of Qwen3.5 and Qwen3: the table of rules from names and shapes to divisions. Pure.

| tensor                                         | divided by                                                        |
|------------------------------------------------|-------------------------------------------------------------------|
| embed_tokens, lm_head                          | rows, after padding to a multiple of 64 rows                      |
| self_attn.q_proj                               | rows; each head has its query and, in Qwen3.5, its gate           |
| self_attn.k_proj, v_proj                       | heads; with more ranks than heads, several ranks have the same head |
| linear_attn.in_proj_qkv                        | rows of the queries, of the keys and of the values                |
| linear_attn.in_proj_z, in_proj_a, in_proj_b    | rows                                                              |
| self_attn.o_proj, linear_attn.out_proj         | columns                                                           |
| gate_proj, up_proj of an MLP or shared expert  | rows                                                              |
| down_proj of an MLP or shared expert           | columns                                                           |
| experts.gate_up_proj, experts.down_proj        | the intermediate size of each expert (tensor parallelism), or experts (expert parallelism) |
| everything else                                | nothing: each rank reads all of it                                |

Everything else is norms, routers, convolutions, A_log, dt_bias and the vision tower, of which vLLM's ranks have all or part.
`tests/rollout/test_vllm_divisions.py` compares the table with the loaders of the installed vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qwen35_trainer.weights.division import Division, TensorSection, columns_divided, rows_divided

type Shape = tuple[int, ...]
type Shapes = Mapping[str, Shape]

VOCABULARY_PADDING = 64
"""vLLM pads the rows of the vocabulary to a multiple of this number (its DEFAULT_VOCAB_PADDING_SIZE)."""


def divisions(shapes: Shapes) -> dict[str, Division]:
    """Return the division of each tensor that the ranks of a replica divide, by name.

    Each rank reads all other tensors whole. shapes: name of each published tensor → its shape.
    """
    divided: dict[str, Division] = {}
    for name, shape in shapes.items():
        for suffix, rule in _RULES.items():
            if name.endswith(suffix) and (division := rule(name, shape, shapes)) is not None:
                divided[name] = division
                break
    return divided


def _vocabulary(_: str, shape: Shape, __: Shapes) -> Division:
    return rows_divided(shape, padding=VOCABULARY_PADDING)


def _rows(_: str, shape: Shape, __: Shapes) -> Division:
    return rows_divided(shape)


def _columns(_: str, shape: Shape, __: Shapes) -> Division:
    return columns_divided(shape)


def _heads(name: str, shape: Shape, shapes: Shapes) -> Division | None:
    """Return the division of a projection to keys or values by heads. The size of a head is that of the layer's k_norm.

    None: the layer's k_norm is not among the tensors, or its size does not divide the rows.
    """
    norm = shapes.get(f"{name.rpartition('.self_attn.')[0]}.self_attn.k_norm.weight")
    return None if norm is None or shape[0] % norm[0] else rows_divided(shape, shape[0] // norm[0])


def _queries_keys_values(name: str, shape: Shape, shapes: Shapes) -> Division | None:
    """Return the division of in_proj_qkv: rows of queries, of keys and of values.

    There are as many rows of values as rows of in_proj_z, and equal numbers of rows of queries and of keys. None: the
    sizes do not allow this.
    """
    gate = shapes.get(name.replace("in_proj_qkv", "in_proj_z"))
    if gate is None or (keys := (shape[0] - gate[0]) // 2) <= 0:
        return None
    return Division(tuple(TensorSection(1, rows, shape[1]) for rows in (keys, keys, gate[0])))


def _experts_gate_up(_: str, shape: Shape, __: Shapes) -> Division:
    """Return the division of gate_up_proj, (experts, 2 · intermediate size, columns).

    Gates come before the other rows.
    """
    experts, rows, columns = shape
    return Division((TensorSection(2 * experts, rows // 2, columns),), experts=experts)


def _experts_down(_: str, shape: Shape, __: Shapes) -> Division:
    """Return the division of down_proj, (experts, rows, intermediate size)."""
    experts, rows, columns = shape
    return Division((TensorSection(experts * rows, columns, 1),), experts=experts)


_RULES: dict[str, Callable[[str, Shape, Shapes], Division | None]] = {
    "language_model.embed_tokens.weight": _vocabulary,
    "model.embed_tokens.weight": _vocabulary,
    "lm_head.weight": _vocabulary,
    ".self_attn.q_proj.weight": _rows,
    ".self_attn.k_proj.weight": _heads,
    ".self_attn.v_proj.weight": _heads,
    ".self_attn.o_proj.weight": _columns,
    ".linear_attn.in_proj_qkv.weight": _queries_keys_values,
    ".linear_attn.in_proj_z.weight": _rows,
    ".linear_attn.in_proj_a.weight": _rows,
    ".linear_attn.in_proj_b.weight": _rows,
    ".linear_attn.out_proj.weight": _columns,
    ".mlp.gate_proj.weight": _rows,
    ".mlp.up_proj.weight": _rows,
    ".mlp.down_proj.weight": _columns,
    ".mlp.shared_expert.gate_proj.weight": _rows,
    ".mlp.shared_expert.up_proj.weight": _rows,
    ".mlp.shared_expert.down_proj.weight": _columns,
    ".mlp.experts.gate_up_proj": _experts_gate_up,
    ".mlp.experts.down_proj": _experts_down,
}
"""End of a tensor's name → the rule that returns its division."""
