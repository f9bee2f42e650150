from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.runtime.prompt_feed import PromptFeed


def drain(feed: PromptFeed) -> list[int]:
    return list(iter(feed.take, None))


def test_positions_come_in_order_and_end():
    feed = PromptFeed(3)
    assert drain(feed) == [0, 1, 2]
    assert feed.take() is None


def test_what_was_on_its_way_comes_before_anything_new():
    assert drain(PromptFeed(6, start=4, pending=(3, 1))) == [3, 1, 4, 5]


def test_a_prompt_given_back_comes_next_even_after_the_end():
    feed = PromptFeed(2)
    assert drain(feed) == [0, 1]
    feed.give_back(0)
    assert (feed.returned, feed.position) == ((0,), 2)
    assert drain(feed) == [0]


@given(end=st.integers(0, 20), data=st.data())
def test_a_resumed_feed_hands_out_exactly_what_was_not_trained(end, data):
    """Whatever was taken, trained and given back: what is left at a stop is all of the rest, once."""
    feed = PromptFeed(end)
    running: list[int] = []
    trained: list[int] = []
    for act in data.draw(st.lists(st.sampled_from(["take", "train", "give back"]), max_size=60)):
        if act == "take" and (position := feed.take()) is not None:
            running.append(position)
        elif act == "train" and running:
            trained.append(running.pop(data.draw(st.integers(0, len(running) - 1))))
        elif act == "give back" and running:
            feed.give_back(running.pop())
    resumed = PromptFeed(end, feed.position, (*running, *feed.returned))
    assert sorted(trained + drain(resumed)) == list(range(end))
