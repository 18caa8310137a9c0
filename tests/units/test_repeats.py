"""Events that come often are told rarely, and none is lost from the count."""

from service.observe.logs import Repeats


def test_what_repeats_is_told_at_once_then_rarely_and_counted() -> None:
    now = [0.0]
    repeats = Repeats(30.0, lambda: now[0])
    assert repeats.due() == 0
    told = []
    for second in range(61):
        now[0] = float(second)
        repeats.add()
        told.append(repeats.due())
    assert [count for count in told if count] == [1, 30, 30]
    now[0] = 1000.0
    assert repeats.due() == 0
