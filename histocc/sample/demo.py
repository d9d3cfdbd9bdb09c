"""Twelve descriptions to show a trained model, which the generator never writes."""

DEMO = (
    ("Widow of a carpenter, Ashby", "en", "95410", "", ""),
    ("Blacksmith and Inn Keeper at Thornby", "en", "83110", "51020", ""),
    ("huusmand og skomager", "da", "61115", "80110", ""),
    ("afdøde fisker fra Ribe", "da", "64100", "", ""),
    ("f.d. torpare i Söderby", "se", "61115", "", ""),
    ("Skräddaregesäll", "se", "79100", "", ""),
    ("weduwe van een timmerman te Leiden", "nl", "95410", "", ""),
    ("zonder eenig beroep", "nl", "-1", "", ""),
    ("Schuhmachermeister in Altdorf", "ge", "80110", "", ""),
    ("witwe eines tagelöhners in Neustadt", "ge", "99920", "", ""),
    ("veuve d'un boulanger à Rouen", "fr", "77610", "", ""),
    ("cultivateur retraité à Villeneuve", "fr", "61110", "", ""),
)


def demo_rows() -> list[tuple[str, str, str, str, str]]:
    """Twelve rows (occ1, lang, hisco_1, hisco_2, hisco_3) in the six languages, none of which `rows` ever
    makes.
    """
    return list(DEMO)
