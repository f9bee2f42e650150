"""What tests of several packages share: a tiny Qwen3.5 straight from the transformers library, the reference; a browser."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import is_hypothesis_test, settings

from tests.core_seconds import RESULTS, CoreSeconds
from tests.forks import start as forks
from tests.patience import PATIENCE
from tests.profiles import ORDER, SHARE, SOAK, SOAK_SHARE

if TYPE_CHECKING:
    from torch import Tensor

# Without a deadline: a busy machine does not break a property. Derandomised in `make test`, so that a change is never refused
# because of an example that another change would have met just as well; `make soak` draws new ones and prints how to repeat them.
settings.register_profile("test", deadline=None, derandomize=True)
settings.register_profile("soak", deadline=None, print_blob=True)
settings.load_profile("soak" if SOAK else "test")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOCABULARY = 23
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
}


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell ignores it for what it starts in the background, and the programs under test would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    results = os.environ.get(RESULTS)
    config.pluginmanager.register(CoreSeconds(Path(results) if results else None), "core-seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `soak` in `make test`. ORDER, if set, shuffles the test files, and SHARE draws some of them.

    Of a file that is not drawn, tests with random examples run, and the tests marked `soak` that SOAK_SHARE draws: the others
    repeat `make test`.
    """
    chosen = sorted({item.path for item in items})
    if ORDER is not None:
        draw = random.Random(ORDER)
        places = {path: draw.random() for path in chosen}
        items.sort(key=lambda item: places[item.path])
        chosen = [path for path in chosen if places[path] < SHARE]
    left_out = [item for item in items if _is_left_out(item, drawn=item.path in chosen)]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def _is_left_out(item: pytest.Item, *, drawn: bool) -> bool:
    is_marked = item.get_closest_marker("soak") is not None
    if not SOAK:
        return is_marked
    if drawn or is_hypothesis_test(getattr(item, "obj", None)):
        return False
    return not is_marked or random.Random(f"{ORDER} {item.nodeid}").random() >= SOAK_SHARE


@pytest.fixture(scope="session", autouse=True)
def fork_server_ends() -> Iterator[None]:
    """The first process that is started by it starts the server; the session ends it."""
    yield
    forks.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real one. Not longer than a module: its event loop runs until then, and tests that are coroutines need their own."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine to open the page in")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        opened = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """eventually(lambda: ..., "what is waited for"): polls until it holds, fails the test when it never does."""

    def wait(holds: Callable[[], object], what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > until:
                pytest.fail(f"not within {PATIENCE:.0f} s: {what}")
            time.sleep(0.1)

    return wait


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """make_model(experts=4, seed=1): random float32 weights that remember some hundred positions."""
    # Seconds to import, and most tests need none of it.
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    def make(*, experts: int = 0, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        if experts:
            config = Qwen3_5MoeTextConfig(
                num_experts=experts,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                shared_expert_intermediate_size=24,
                **SHAPE,
            )
            model = Qwen3_5MoeForCausalLM(config)
        else:
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(intermediate_size=48, **SHAPE))
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                # Fresh weights forget within a few positions, which would hide a state that leaks or gets lost.
                layer.linear_attn.A_log.data.fill_(-4.0)
        return model.eval()

    return make


@pytest.fixture
def tokens() -> Callable[..., "Tensor"]:
    """tokens(2, 65): random ids, (2, 65) int64, the same for the same arguments."""
    import torch

    def draw(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))

    return draw
