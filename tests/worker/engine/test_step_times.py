"""What the limit of prompts learns of each step, in both ways of launching."""

from types import SimpleNamespace

import pytest

from inferq.worker.engine import engine as engine_module
from inferq.worker.engine.scheduling.prompt_limit import PromptLimit

#: Seconds that the device takes for a token, and the host to launch a step.
TOKEN_S, LAUNCH_S = 1.0, 0.25


class TimedDevice:
    """A runner whose device computes one step after the other, on a clock of its own."""

    def __init__(self, runner, launches_ahead):
        self._runner = runner
        self._launch_s = LAUNCH_S if launches_ahead else 0.0
        self.now = 100.0
        self._free_at = 0.0

    def launch(self, plan):
        self.now += self._launch_s
        self._free_at = max(self.now, self._free_at) + TOKEN_S * plan.num_tokens
        ends_at, found = self._free_at, self._runner.execute(plan)

        def results():
            self.now = max(self.now, ends_at)
            return found

        return SimpleNamespace(results=results)

    def execute(self, plan):
        return self.launch(plan).results()


class Noting(PromptLimit):
    tokens = 16

    def __init__(self):
        self.steps = []

    def learn(self, *, num_decodes, num_tokens, seconds):
        self.steps.append((num_decodes, num_tokens, seconds))


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def launches_ahead(request):
    return request.param


def test_every_step_is_learnt_from_with_the_time_that_it_took(
    simulation, launches_ahead, monkeypatch
):
    sim = simulation(64, launches_ahead=launches_ahead, max_prompt_tokens=16)
    device = TimedDevice(sim.runner, launches_ahead)
    limit = Noting()
    sim.engine._runner, sim.engine._prompt_limit = device, limit
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: device.now))
    for name in ("a", "b"):
        sim.add(name, [*range(3, 13)], max_tokens=5, ignore_eos=True)
        sim.step()
    sim.run()
    device.now += 1000.0  # nobody asks for anything meanwhile
    sim.add("c", [3, 4, 5], max_tokens=2, ignore_eos=True)
    sim.run()
    assert [step[:2] for step in limit.steps] == [
        (plan.num_decodes, plan.num_tokens) for plan in sim.step_plans
    ]
    assert len(limit.steps) > 5
    assert any(decodes < tokens for decodes, tokens, _ in limit.steps)
    for _, tokens, seconds in limit.steps:
        # a step that nothing ran before begins with its launch
        assert seconds - tokens * TOKEN_S in (0.0, LAUNCH_S if launches_ahead else 0.0)
