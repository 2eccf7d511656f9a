"""Parses many command lines in one process and writes what each was answered; argv: cases.json answers.json."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    from megatron.training.arguments import parse_and_validate_args

    from megatron_hdp.errors import HdpError

    cases_file, answers_file = sys.argv[1:]
    answers = []
    for argv in json.loads(Path(cases_file).read_text()):
        sys.argv = ["pretrain_gpt.py", *argv]
        try:
            parse_and_validate_args()
        except HdpError as error:
            answers.append(f"{type(error).__name__}: {error}")
            continue
        except BaseException as error:
            answers.append(f"not ours: {type(error).__name__}: {error}")
            continue
        answers.append("accepted")
        break  # Megatron's global variables are set now, so no further case can be tried
    Path(answers_file).write_text(json.dumps(answers))
