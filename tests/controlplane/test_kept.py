"""The manifests that are tried on the API server reach all that they are kept for."""

import json

from tests.controlplane import kept


def test_they_reach_every_field_and_every_fragment():
    reached = set().union(*(kept.reached(item) for item in kept.load()["sane"]))
    assert kept.everything() - reached == set()


def test_they_are_refused_accepted_and_reported():
    for kind, manifests_of in kept.load().items():
        reached = set().union(*(kept.reached(manifest) for manifest in manifests_of))
        assert "accepted" in reached, kind
        assert any(word.startswith("refused ") for word in reached), kind
        assert any(word.startswith("problem ") for word in reached), kind


def test_none_is_there_for_nothing():
    for manifests_of in kept.load().values():
        words = [kept.reached(manifest) for manifest in manifests_of]
        for number, phrase in enumerate(words):
            assert phrase - set().union(*words[:number]), json.dumps(manifests_of[number])
