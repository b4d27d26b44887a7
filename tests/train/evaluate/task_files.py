"""Three tasks with local files: choices, texts to score, and texts to continue."""

import json
from pathlib import Path

NAMES = ["toy_choices", "toy_texts", "toy_answers"]

_HEAD = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
output_type: {output_type}
"""
_CHOICES = """
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
_TEXTS = """
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
_ANSWERS = """
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
_KINDS = {
    "toy_choices": ("multiple_choice", _CHOICES),
    "toy_texts": ("loglikelihood_rolling", _TEXTS),
    "toy_answers": ("generate_until", _ANSWERS),
}


def rows_of(name: str) -> list[dict]:
    """Return a task's examples, which have many lengths; some are longer than a row."""
    if name == "toy_texts":
        return [{"text": f"line {i} says {i * 'so '}" * (i + 1)} for i in range(9)]
    return [
        {
            "question": f"{'over and ' * (i % 5)}what is {i}",
            "choices": [f" {i}", " none of these", f" {'x' * (i % 7 + 1)}"],
            "answer": i % 3,
        }
        for i in range(11)
    ]


def write_tasks(folder: Path, **replaced: str) -> str:
    """Write the task files, with texts replaced, and their data; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (output_type, body) in _KINDS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))
        head = _HEAD.format(name=name, data=data, output_type=output_type)
        text = head + body
        for old, new in replaced.items():
            text = text.replace(old, new)
        (folder / f"{name}.yaml").write_text(text)
    return str(folder)
