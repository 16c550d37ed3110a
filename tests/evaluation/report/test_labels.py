"""Places of labels: free, inside, near."""

import itertools
import math

from quantkit.evaluation.report.labels import LabelBox, LabelRequest, place_labels

INSIDE = LabelBox(0, 0, 500, 300)


def overlap(first, second):
    return (max(0, min(first.right, second.right) - max(first.left, second.left))
            * max(0, min(first.top, second.top) - max(first.bottom, second.bottom)))


def request(x, y, width=60, required=True):
    return LabelRequest(x, y, width, 10, required)


def test_alone_it_stands_right_of_its_mark_and_left_at_the_edge():
    alone, = place_labels([request(100, 150)], 5, INSIDE)
    assert 105 < alone.left < 115 and alone.bottom < 150 < alone.top
    edge, = place_labels([request(490, 150)], 5, INSIDE)
    assert 475 < edge.right < 490


def test_nothing_covers_anything():
    marks = [(50 + 25 * (number % 7), 60 + 40 * (number // 7)) for number in range(28)]
    places = [place for place in place_labels([request(x, y, 40, False) for x, y in marks], 4, INSIDE)
              if place]
    assert len(places) > 8
    assert all(overlap(first, second) == 0 for first, second in itertools.combinations(places, 2))
    for place in places:
        assert place.left >= 0 and place.right <= 500 and place.bottom >= 0 and place.top <= 300
        assert all(overlap(place, LabelBox(x - 4, y - 4, x + 4, y + 4)) == 0 for x, y in marks)


def test_where_all_is_full_only_the_required_stand():
    crowd = [request(250, 150, 480, required) for required in [False] * 30 + [True] * 3]
    places = place_labels(crowd, 4, LabelBox(0, 130, 500, 170))
    assert all(places[-3:]) and not all(places[:-3])


def test_a_line_is_kept_free_where_it_can_be():
    line = [(x, 150) for x in range(100, 300, 2)]
    free, = place_labels([request(100, 150)], 5, INSIDE, line)
    assert not (free.left <= 150 <= free.right and free.bottom <= 150 <= free.top)


def test_what_has_no_room_at_all_has_no_place():
    assert place_labels([request(10, 10, 900)], 5, INSIDE) == [None]
    assert place_labels([], 5, INSIDE) == []


def test_places_are_near_their_marks():
    place, = place_labels([request(250, 150)], 5, INSIDE)
    assert math.dist((250, 150), (place.left, (place.bottom + place.top) / 2)) < 20
