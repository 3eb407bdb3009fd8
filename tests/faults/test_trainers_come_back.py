"""A trainer that was restarted goes on: alone at the step it was at, or with all others from a state."""

import overlord as ol
from tests.service.served import content, served, streams, two_sources, undisturbed

JOB = two_sources(mesh=ol.Mesh(dp=2))


def test_a_trainer_that_comes_back_alone_takes_its_step_again_and_goes_on():
    expected = undisturbed(JOB, 8)
    with served(JOB) as (_, address):
        clients = [ol.connect(address, rank=rank, timeout_s=60) for rank in range(2)]
        assert streams(clients, 4) == [steps[:4] for steps in expected]
        lost = next(clients[1])  # it dies before it has trained on it
        assert content(lost) == expected[1][4]
        again = ol.connect(address, rank=1, timeout_s=60)
        again.rejoin(at=4)
        assert again.step == 4
        assert streams([clients[0], again], 4) == [steps[4:] for steps in expected]


def test_one_that_comes_late_and_loads_the_state_that_others_have_loaded_throws_out_nobody():
    expected = undisturbed(JOB, 9)
    with ol.start(JOB) as loader:
        state = loader.state_before(3)
    with served(JOB) as (_, address):
        first = ol.connect(address, rank=0, timeout_s=60)
        first.load_state_dict(state)
        found = streams([first], 2)
        late = ol.connect(address, rank=1, timeout_s=60)
        late.load_state_dict(state)
        assert streams([late], 2) == [expected[1][3:5]]
        found[0] += streams([first], 2)[0]
        assert found == [expected[0][3:7]]
        # And all may go back there once more, one after another, each a client that has read nothing.
        again = [ol.connect(address, rank=rank, timeout_s=60) for rank in range(2)]
        for client in again:
            client.load_state_dict(state)
        assert streams(again, 6) == [steps[3:] for steps in expected]
