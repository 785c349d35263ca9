"""Stand-ins are measured by every rule, each policy and look by one program at a time, in one results file."""

import shlex
from itertools import chain, product

from experiment.episodes import EpisodeKey, Rule
from experiment.results import Results, write_results
from tests.stored_runs import SETTINGS, episode
from workshop import stand_ins


def test_every_policy_and_look_has_one_chain_of_programs_and_a_table_of_all_rules(
    tmp_path, monkeypatch, capsys
):
    programs = {}

    def pretend(chains, at_once):
        programs.update(chains)
        for log, commands in chains.items():
            words = list(chain(*map(shlex.split, commands)))
            is_l1 = "l1" in words
            rules = [Rule("l1")] if is_l1 else stand_ins.RULES
            episodes = [
                episode(EpisodeKey("libero_spatial", 0, True, state), rule, rule.mode != "sample")
                for rule, state in product(rules, range(4))
            ]
            write_results(log.with_suffix(".json"), Results(SETTINGS, {}, episodes))

    monkeypatch.setattr(stand_ins, "run_side_by_side", pretend)
    flags = ["--measure", "POLICY", "--only", "bundled", "l1", "--looks", "lowpoly", "official"]
    stand_ins.main([str(tmp_path), *flags])
    assert len(programs) == 4
    for log, commands in programs.items():
        assert all(f"--out {log.with_suffix('.json')}" in command for command in commands)
    table = capsys.readouterr().out
    for rule in (*stand_ins.RULES, Rule("l1")):
        assert table.count(f"\n  {rule} ") == 2
    assert table.count("holds: greedy is 100.0 points above sampled at T = 1") == 2
