"""Which prompt comes next."""

from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.pipeline.prompt_feed import PromptFeed


def first(feed: PromptFeed, count: int) -> list[int]:
    return [feed.take() for _ in range(count)]


def test_positions_come_in_order_without_end():
    feed = PromptFeed()
    assert first(feed, 4) == [0, 1, 2, 3]
    assert feed.position == 4


def test_what_was_on_its_way_comes_before_anything_new():
    assert first(PromptFeed(start=4, pending=(3, 1)), 4) == [3, 1, 4, 5]


def test_a_prompt_given_back_comes_next():
    feed = PromptFeed()
    assert first(feed, 2) == [0, 1]
    feed.give_back(0)
    assert (feed.returned, feed.position) == ((0,), 2)
    assert first(feed, 2) == [0, 2]


@given(data=st.data())
def test_a_resumed_feed_yields_exactly_what_was_not_trained(data):
    """Whatever was taken, trained and given back: what comes after a stop is all of the rest, once."""
    feed = PromptFeed()
    running: list[int] = []
    trained: list[int] = []
    for act in data.draw(st.lists(st.sampled_from(["take", "train", "give back"]), max_size=60)):
        if act == "take":
            running.append(feed.take())
        elif act == "train" and running:
            trained.append(running.pop(data.draw(st.integers(0, len(running) - 1))))
        elif act == "give back" and running:
            feed.give_back(running.pop())
    resumed = PromptFeed(feed.position, (*running, *feed.returned))
    rest = first(resumed, feed.position + 5 - len(trained))
    assert sorted(trained + rest) == list(range(feed.position + 5))
