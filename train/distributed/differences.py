"""Describe how processes differ that must be equal."""

from train.distributed.rendezvous import numbered


def differences(facts: list[dict[str, str]]) -> list[str]:
    """Return lines of who has what of each fact that differs, the many first."""
    lines = []
    for name in dict.fromkeys(key for fact in facts for key in fact if key != "host"):
        holders: dict[str, list[int]] = {}
        for process, fact in enumerate(facts):
            holders.setdefault(fact.get(name, "nothing"), []).append(process)
        if len(holders) > 1:
            most_first = sorted(holders.items(), key=lambda item: -len(item[1]))
            lines.append(f"  {name}:")
            lines += [
                f"    {value} on {numbered(processes)} "
                f"(host {facts[processes[0]]['host']})"
                for value, processes in most_first
            ]
    return lines
