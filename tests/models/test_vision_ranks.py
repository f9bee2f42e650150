"""A sharded vision-language model whose ranks show different things."""

import json
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def test_ranks_with_images_videos_and_nothing_wait_for_the_same_collectives_and_get_the_right_gradients(tmp_path):
    command = [sys.executable, "-m", "tests.models.vision_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-2000:] for error in errors)
    for rank in range(2):
        differences = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(differences) == 12
        assert max(differences.values()) < 1e-5, differences
