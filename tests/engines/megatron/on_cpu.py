"""What each rank imports before megatron-core: it changes torch for the whole process. The ranks' fork server imports it too."""

import warnings

from qwen35_trainer.engines.megatron import cpu

warnings.filterwarnings("ignore", module=r"megatron\.")
cpu.install()

import qwen35_trainer.engines.megatron.engine  # noqa: E402, F401  # 4 core-seconds
