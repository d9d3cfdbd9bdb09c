"""What registers in each language write around an occupation's title: widows, ranks of a craft, places, old spellings.

Keys are the columns of occupations.csv. `{}` stands for the title; in French `de {}` becomes `d'{}` before a vowel.
`{}s` is a genitive, written only where the title takes an s. Nothing here changes the code of the title it stands with.
"""

# What a language is called in rows: the tags of the published models.
TAGS = {"en": "en", "da": "da", "sv": "se", "nl": "nl", "de": "ge", "fr": "fr"}

# Occupations whose titles are women's; they get no widows and, where grammar asks for it, other words for "former".
WOMEN = frozenset("54010 79510 79140 75220 56010 22430 07310 79320 79565 62510 54035 54050 55220 32140 38020 07110 "
                  "13960 14140".split())

NO_WIDOWS = frozenset(["14120"])         # clergymen, some of whom may not marry

FORMER = {
    "en": ("retired {}", "{} (retired)", "formerly {}", "former {}", "late {}", "{} (deceased)", "{}, dec'd", "deceased {}"),
    "da": ("fhv. {}", "forhenværende {}", "forh. {}", "tidligere {}", "afdøde {}", "afd. {}", "pens. {}"),
    "sv": ("f.d. {}", "f. d. {}", "förutvarande {}", "avlidne {}", "avl. {}", "förre {}"),
    "nl": ("gewezen {}", "gew. {}", "voormalig {}", "oud {}", "wijlen {}", "gepensioneerd {}"),
    "de": ("gewesener {}", "gew. {}", "ehemaliger {}", "ehem. {}", "verstorbener {}", "weiland {}"),
    "fr": ("ancien {}", "anc. {}", "ex {}", "feu {}", "{} retraité", "défunt {}"),
}
FORMER_WOMEN = {
    "en": ("retired {}", "{} (retired)", "formerly {}", "former {}", "late {}", "{} (deceased)"),
    "da": ("fhv. {}", "forhenværende {}", "tidligere {}", "afdøde {}"),
    "sv": ("f.d. {}", "f. d. {}", "förutvarande {}", "avlidna {}"),
    "nl": ("gewezen {}", "gew. {}", "voormalige {}", "wijlen {}"),
    "de": ("gewesene {}", "gew. {}", "ehemalige {}", "ehem. {}"),
    "fr": ("ancienne {}", "anc. {}", "ex {}", "feue {}"),
}
WIDOW = {
    "en": ("widow of {}", "widow of a {}", "{}'s widow", "wid. of {}", "widow of the late {}"),
    "da": ("enke efter {}", "enke efter en {}", "{}s enke", "enke e. {}", "{} enke"),
    "sv": ("änka efter {}", "änka efter en {}", "{}s änka", "enka efter {}", "{} änka"),
    "nl": ("weduwe van {}", "weduwe van een {}", "wed. van {}", "wed. {}", "{} weduwe"),
    "de": ("witwe eines {}s", "{}s witwe", "wwe. eines {}s", "{} witwe", "wittwe des {}s"),
    "fr": ("veuve de {}", "veuve d'un {}", "vve de {}", "vve d'un {}", "{} (veuve)"),
}
# Ranks of a craft (codes from 75000 to below 96000); the second table joins them to one-word titles with this ending.
CRAFT = {
    "en": ("master {}", "journeyman {}", "{} journeyman", "apprentice {}", "{}'s apprentice", "assistant {}"),
    "da": ("mester {}",),
    "sv": ("mäster {}",),
    "nl": ("meester {}", "leerling {}"),
    "de": (),
    "fr": ("maître {}", "compagnon {}", "apprenti {}", "aide {}"),
}
CRAFT_ENDING = {
    "da": ("r", "r", ("svend", "mester", "lærling")),
    "sv": ("are", "ar", ("gesäll", "mästare", "lärling")),
    "nl": ("er", "er", ("sknecht",)),
    "de": ("er", "er", ("meister", "geselle", "lehrling")),
}
NOT_A_CRAFT = ("arbe", "werker", "mester", "mäst", "meister")          # in titles that take no rank of a craft

TOWNS = {
    "en": ("ashby", "thornby", "westbrook", "langley", "northwick", "milford", "oakham", "stanton", "bradley", "hillside"),
    "da": ("odense", "nørreby", "vesterby", "aalborg", "sønderby", "holme", "ribe", "lundby", "viborg", "østerby"),
    "sv": ("söderby", "norrby", "lund", "västerås", "granby", "hammarby", "kalmar", "ekeby", "sundby", "vallby"),
    "nl": ("oosterdam", "leiden", "noorddorp", "westerveen", "gouda", "zuidhoek", "deventer", "molenbeek", "haarlem",
           "nieuwdorp"),
    "de": ("altdorf", "neustadt", "kirchheim", "oberbach", "steinfeld", "grünau", "waldkirch", "niederhof", "lindenau",
           "talheim"),
    "fr": ("saint-martin", "villeneuve", "beaulieu", "montfort", "la rochette", "saint-pierre", "neuville", "bellefontaine",
           "rouen", "clairval"),
}
IN_TOWN = {
    "en": ("{} of @", "{} in @", "{} at @", "{}, @"),
    "da": ("{} i @", "{} fra @", "{}, @"),
    "sv": ("{} i @", "{} från @", "{}, @"),
    "nl": ("{} te @", "{} in @", "{}, @"),
    "de": ("{} in @", "{} zu @", "{} aus @", "{}, @"),
    "fr": ("{} à @", "{} de @", "{}, @"),
}
# Employers, for crafts only: "servant at the mill" would be something else than a servant.
EMPLOYER = {
    "en": ("{} at the mill", "{} at the old works", "{} on the estate", "{} for mr. hale", "{} with t. brand"),
    "da": ("{} ved møllen", "{} på godset", "{} hos n. holm", "{} hos enken", "{} ved værket"),
    "sv": ("{} vid bruket", "{} på herrgården", "{} hos p. lind", "{} vid kvarnen", "{} under storgården"),
    "nl": ("{} bij de molen", "{} op het landgoed", "{} bij j. de vos", "{} bij de weduwe", "{} aan de haven"),
    "de": ("{} bei der mühle", "{} auf dem gut", "{} bei herrn voss", "{} im werk", "{} bei der witwe"),
    "fr": ("{} au moulin", "{} au château", "{} chez m. durand", "{} au bourg", "{} chez la veuve"),
}
AND = {"en": ("and", "and", "&"), "da": ("og", "og", "&"), "sv": ("och", "och", "&"), "nl": ("en", "en", "&"),
       "de": ("und", "und", "u."), "fr": ("et", "et", "&")}

# Old spellings and those of another hand: (what is written in the table, as a regular expression; what stands instead).
SPELLING = {
    "en": ((r"(?<=\w)maker", " maker"), (r"(?<=\w)maker", "-maker"), ("our", "or"), ("ai", "ay"), ("i(?=[tr][^aeiou])", "y"),
           ("ll", "l"), ("(?<=[aeo])k(?=e)", "ck"), ("(?<=[aeiou])([lt])(?=er)", r"\1\1"),
           ("ee", "ea"), ("ea", "ee"), ("ss", "s"), ("(?<=[^aeiou])y$", "ie"), ("th$", "the"), ("coal", "cole")),
    "da": (("å", "aa"), ("v", "w"), ("hus", "huus"), ("mand", "mann"), ("(?<=[aeouyæøå])k(?=[aeou])", "ck"), ("tj", "ti"),
           ("æ", "e"), ("ø", "ö"), ("^sk", "sch"), ("mur", "muur"), ("dd", "d"), ("ks", "x"),
           ("(?<=[aeiouy])g(?=er)", "gg"), ("ej", "ei"), ("i(?=[rl])", "ii"), ("ld", "ll"), ("f(?=ør)", "ff")),
    "sv": (("v", "w"), ("(?<=[aeiouäö])k(?=[ae])", "ck"), ("ck", "k"), ("ä", "e"), ("å", "aa"), ("kv", "qv"),
           (r"\bt(?=[aeioä])", "th"), ("rd", "rdh"), ("are$", "ar"), ("sj", "si"), ("ö", "o"), ("dd", "d"), ("rk", "rck"),
           ("mm", "m"), ("(?<=[aeo])f(?=t)", "ff")),
    "nl": (("ij", "y"), ("aa", "ae"), ("(?<=[aeo])k(?=er|$)", "ck"), ("g(?=[ei])", "gh"), ("ui", "uy"), ("ee", "e"),
           ("z", "s"), ("oe(?=[nkr])", "ou"), ("mm", "m"), ("ei", "ey"), (r"\bt(?=[aio])", "th"), ("d$", "dt"),
           ("sch(?=[or])", "sc"), ("kk", "ck")),
    "de": (("ei", "ey"), (r"\bt(?=[aeioö])", "th"), ("rt$", "rth"), ("ü", "ue"), ("ä", "ae"), ("ö", "oe"),
           ("(?<![cs])k(?=[aolrnä])", "c"), ("ä", "e"), ("ß", "ss"), ("(?<=[aeiou])f(?=t)", "ff"), ("(?<=[nr])z", "tz"),
           ("nn", "n"), ("(?<=u)hm", "m"), ("(?<=[nr])k(?=er|$)", "ck"), ("tt", "t"), ("ck", "kk")),
    "fr": (("é", "e"), ("[èê]", "e"), ("î", "is"), ("oi", "oy"), ("ç", "c"), ("ç", "ss"), ("œ", "oe"), ("ss", "s"),
           ("nn", "n"), ("ll", "l"), ("and$", "ant"), ("i(?=er|eur)", "y"), ("ê", "es"), ("(?<=[aeo])l(?=ier)", "ll"),
           ("(?<=[aeou])n(?=i?er)", "nn"), ("mm", "m")),
}

# Abbreviations that clerks used; the general ones, a title cut short with a dot, are made from the titles.
SHORT = {
    "en": {"labourer": ("lab.", "labr."), "agricultural labourer": ("ag. lab.", "agr. lab.", "agric. lab."),
           "general labourer": ("gen. lab.",), "farm labourer": ("farm lab.",), "day labourer": ("day lab.",),
           "carpenter": ("carp.", "carpr."), "shoemaker": ("shoemkr.", "shoem."), "dressmaker": ("dressmkr.", "dressm."),
           "domestic servant": ("dom. serv.", "dom. servt."), "servant": ("serv.", "servt."), "merchant": ("mercht.",),
           "bricklayer": ("bricklr.",), "blacksmith": ("blacksm.",), "farmer": ("farmr.",), "schoolmaster": ("schoolmr.",)},
    "da": {"arbejdsmand": ("arbmd.", "arb.md.", "arbm."), "arbejder": ("arb.",), "tjenestepige": ("tj.pige", "tjenestep."),
           "tjenestekarl": ("tj.karl", "tjenestek."), "husmand": ("husmd.",), "gårdmand": ("gårdmd.", "gdmd."),
           "handelsmand": ("handelsmd.",), "skomager": ("skom.",), "daglejer": ("dagl.",), "gårdejer": ("gårdej.",)},
    "sv": {"arbetare": ("arb.",), "hemmansägare": ("hem.äg.", "hemmansäg."), "torpare": ("torp.",), "skomakare": ("skom.",),
           "fabriksarbetare": ("fabr.arb.",), "jordbruksarbetare": ("jordbr.arb.",), "timmerman": ("timm.",),
           "lantbrukare": ("lantbr.",), "snickare": ("snick.",), "skräddare": ("skrädd.",)},
    "nl": {"arbeider": ("arb.",), "dagloner": ("dagl.",), "landbouwer": ("landb.",), "dienstmeid": ("dienstm.",),
           "timmerman": ("timm.",), "schoenmaker": ("schoenm.",), "kleermaker": ("kleerm.",),
           "fabrieksarbeider": ("fabr.arb.",)},
    "de": {"arbeiter": ("arb.",), "tagelöhner": ("tagel.", "tagelöhn."), "schuhmacher": ("schuhm.",),
           "dienstmagd": ("dienstm.",),
           "fabrikarbeiter": ("fabr.arb.",), "zimmermann": ("zimm.",), "schneider": ("schneid.",), "tischler": ("tischl.",)},
    "fr": {"cultivateur": ("cult.", "cultiv."), "journalier": ("journ.", "journal."), "domestique": ("dom.", "domest."),
           "cordonnier": ("cordon.",), "tisserand": ("tiss.",), "menuisier": ("menuis.",), "négociant": ("négoc.",),
           "couturière": ("coutur.",)},
}
