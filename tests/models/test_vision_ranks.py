"""A sharded vision-language model whose ranks show different things."""

import json

from tests.models.rank_processes import run_ranks


def test_ranks_with_images_videos_and_nothing_wait_for_the_same_collectives_and_get_the_right_gradients(tmp_path):
    run_ranks("tests.models.vision_rank", 2, 2, tmp_path)
    for rank in range(2):
        differences = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(differences) == 12
        assert max(differences.values()) < 1e-5, differences
