"""Whether a run on occupations that is resumed is the one that these arguments ask for."""

from histocc.job import recipe
from histocc.job.flags import resumable_flags
from histocc.job.settings import Settings
from histocc.model.ngrams import AUTO, NONE
from histocc.trainer import resume


def refuse_other_arguments(settings: Settings, state: dict) -> None:
    """Raises UserError where a resumed run is asked for with arguments that decide the result and differ."""
    more = differing_model(settings, state)
    resume.refuse_other_arguments(settings, state["args"], resumable_flags(), more)


def differing_model(settings: Settings, state: dict) -> list[str]:
    """Flags that were given and say another model or other losses than the checkpoint of a run, a line
    each.
    """
    model, asked, before, different = settings.model, settings.asked, state["args"], []
    size = before.get("model_size")
    if model.model_size not in (None, size):
        different.append(f"--model-size was {size!r}, now it is {model.model_size!r}")
    config = state["config"]
    different += recipe.differing(asked, before)
    if bool(settings.teaching.teacher) != bool(before.get("teacher")) and not asked["eval_only"]:
        different.append(f"--teacher was {before.get('teacher')}, now it is {settings.teaching.teacher}")
    if model.ngrams != before.get("ngrams", AUTO if model.ngrams == AUTO else NONE):
        different.append(f"--ngrams was {state['args'].get('ngrams', NONE)}, now it is {model.ngrams}")
    if model.memory_mask not in (None, config["memory_mask"]):
        different.append(
            f"--{'no-' * config['memory_mask']}memory-mask: its decoder"
            f" {'leaves out' if config['memory_mask'] else 'looks at'} padding"
        )
    if model.published_target_mask and config["target_mask"]:
        different.append("--published-target-mask: it was started without")
    if model.clean_text not in (None, config["text"]):
        different.append(f"--clean-text was {config['text']!r}, now it is {model.clean_text!r}")
    return different
