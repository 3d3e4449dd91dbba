"""Requests go in the order of what is there of them, and few pass anybody."""

from __future__ import annotations

from scheduling_rig import SchedulingRig, answers_alone, ask, request, tokens

from hicache.engine.cache_aware import MAX_PASSES


def test_who_has_kv_on_the_device_goes_before_who_has_it_on_the_host_and_who_has_none() -> None:
    with SchedulingRig(max_batch_requests=1) as rig:
        hosted, resident = tokens("hosted", 100), tokens("resident", 100)
        rig.run(request("1", hosted))
        rig.drop_device()
        rig.run(request("2", resident))
        queue = {
            "cold 1": tokens("cold", 100),
            "host 1": hosted,
            "device 1": resident,
            "cold 2": tokens("also cold", 100),
            "host 2": [*hosted, 1],
            "device 2": [*resident, 1],
        }
        rig.submit(*(request(name, prompt) for name, prompt in queue.items()))
        served = []
        while rig.engine.waiting:
            served += [one.request_id for one in rig.engine.step()]
    # What the host had is on the device as soon as the first of the two has run.
    assert served == ["device 1", "device 2", "host 1", "host 2", "cold 1", "cold 2"]


def test_a_request_without_kv_is_passed_by_a_bounded_number_of_others() -> None:
    with SchedulingRig(max_batch_requests=1) as rig:
        resident = tokens("resident", 100)
        rig.run(request("first", resident))
        cold = request("cold", tokens("cold", 100))
        rig.submit(cold)
        served: list[str] = []
        for number in range(2 * MAX_PASSES):
            rig.submit(request(f"hot {number}", [*resident, number]))
            served += [one.request_id for one in rig.engine.step()]
        assert served.index("cold") == MAX_PASSES
        rig.run()
        assert rig.engine.counters["passed_requests"] == MAX_PASSES


def test_a_request_that_was_passed_too_often_is_not_held_back_any_more() -> None:
    with SchedulingRig(chunk_tokens=200) as rig:
        rig.submit(ask(1))
        rig.engine.step()
        second = ask(2)
        second.standing.num_passes = MAX_PASSES
        rig.submit(second)
        rig.engine.step()
        assert rig.names() == [second.request_id]
        rig.run()
    assert (second.device_hit_tokens, second.delayed_hit_tokens) == (192, 0)
    assert [second.output_ids] == answers_alone([second])


def test_a_request_that_lacks_room_is_the_next_once_it_was_passed_too_often() -> None:
    with SchedulingRig(device_tokens=512, max_batch_requests=2) as rig:
        rig.submit(request("runs", tokens("runs", 200), answer=60))
        rig.engine.step()
        large = request("large", tokens("large", 400))
        rig.submit(large)
        served: list[str] = []
        for number in range(2 * MAX_PASSES):
            rig.submit(request(f"small {number}", tokens(number, 30)))
            served += [one.request_id for one in rig.engine.step() if one.request_id != "runs"]
        # The batch has a place, and nobody else gets it.
        assert served == [f"small {number}" for number in range(MAX_PASSES)]
        while not large.finished:
            served += [one.request_id for one in rig.engine.step() if one.request_id != "runs"]
        assert served[MAX_PASSES] == "large"
        rig.run()
