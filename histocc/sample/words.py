"""What registers in each language write around an occupation's title: widows, ranks of a craft, places, old spellings.

Keys are the columns of occupations.csv. `{}` stands for the title; in French `de {}` becomes `d'{}` before a vowel.
`{}s` is a genitive, written only where the title takes an s. Nothing here changes the code of the title it stands with.
"""

# What a language is called in rows: the tags of the published models.
TAGS = {"en": "en", "da": "da", "sv": "se", "nl": "nl", "de": "ge", "fr": "fr"}

# Occupations whose titles are women's; they get no widows and, where grammar asks for it, other words for "former".
WOMEN = frozenset("54010 79510 79140 75220 56010 22430 07310 79320 79565 62510 54035 54050 55220 32140 38020 07110 "
                  "13960 14140 79550 56065 75250 75452 75550 13420 54040".split())

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

# Abbreviations that clerks usually wrote; others, made from the titles themselves, are in `histocc.sample.short`.
USUAL_SHORT = {
    "en": {"labourer": ("lab.", "labr.", "labr", "lab'r"),
           "agricultural labourer": ("ag. lab.", "agr. lab.", "agric. lab.", "ag lab"),
           "general labourer": ("gen. lab.", "gen. labr.", "g. lab."),
           "farm labourer": ("farm lab.", "fm. lab.", "farm labr"),
           "day labourer": ("day lab.", "day labr.", "d. lab."), "farmer": ("farmr.", "farmr"),
           "farm servant": ("farm serv.", "fm. servt."), "carpenter": ("carp.", "carpr.", "carptr"),
           "shoemaker": ("shoemkr.", "shoem.", "shoemr"), "dressmaker": ("dressmkr.", "dressm."),
           "domestic servant": ("dom. serv.", "dom. servt.", "dom. sert."),
           "servant": ("serv.", "servt.", "servt", "srvt"), "merchant": ("mercht.", "mercht"),
           "bricklayer": ("bricklr.", "brickl.", "bklayer"), "blacksmith": ("blacksm.", "blksmith"),
           "schoolmaster": ("schoolmr.", "schoolmr", "sch. master"),
           "coal miner": ("coal minr.", "c. miner", "coalmr."), "soldier": ("soldr.", "soldr", "sol."),
           "weaver": ("weavr.", "wvr."), "tailor": ("tailr.", "tlr."), "mariner": ("marinr.",),
           "gardener": ("gardr.", "gardr", "gard."), "grocer": ("groc.", "grocr."), "butcher": ("butchr.",),
           "innkeeper": ("innkpr.", "innkr"), "housekeeper": ("housekpr.", "hskpr."),
           "manufacturer": ("manufr.", "manfr."), "shopkeeper": ("shopkpr.", "shopkr"),
           "laundress": ("laundrs.", "laund."), "factory worker": ("fact. worker", "fact. wkr."),
           "clergyman": ("clerg.", "clergn.")},
    "da": {"arbejdsmand": ("arbmd.", "arb.md.", "arbm.", "arb.mand"), "arbejder": ("arb.", "arbdr."),
           "tjenestepige": ("tj.pige", "tjenestep.", "tjpige", "tj. pige"),
           "tjenestekarl": ("tj.karl", "tjenestek.", "tjkarl"), "husmand": ("husmd.", "hmd.", "husm."),
           "gårdmand": ("gårdmd.", "gdmd.", "grdm."), "handelsmand": ("handelsmd.", "handelsm."),
           "skomager": ("skom.", "skomgr."), "daglejer": ("dagl.", "daglr."),
           "gårdejer": ("gårdej.", "gdr.", "grdejer"), "snedker": ("snedk.", "sndkr."), "tømrer": ("tømr.", "tmr."),
           "smed": ("smd.",), "skrædder": ("skræd.", "skrdr."), "fisker": ("fisk.",), "købmand": ("købmd.", "kbm."),
           "landmand": ("landmd.", "landm."), "sømand": ("sømd.",),
           "fabriksarbejder": ("fabr.arb.", "fabriksarb.", "fabr. arbejder"),
           "landarbejder": ("landarb.", "landarbdr."), "møller": ("møll.",), "skolelærer": ("skolel.", "sk.lærer"),
           "murer": ("mur.",)},
    "sv": {"arbetare": ("arb.", "arbet.", "arbre"), "hemmansägare": ("hem.äg.", "hemmansäg.", "hem. ägare", "hmägare"),
           "torpare": ("torp.", "torpre", "tp."), "skomakare": ("skom.", "skomre"),
           "arbetskarl": ("arb.karl", "arbk.", "arb. karl"),
           "fabriksarbetare": ("fabr.arb.", "fabriksarb.", "fabr. arb."),
           "jordbruksarbetare": ("jordbr.arb.", "jordbruksarb."), "timmerman": ("timm.", "timmermn"),
           "lantbrukare": ("lantbr.", "landtbr."), "snickare": ("snick.", "snickre"), "skräddare": ("skrädd.",),
           "bonde": ("bde",), "dräng": ("dr.", "drg."), "piga": ("pig.", "pga"), "soldat": ("sold.", "sdt"),
           "tjänsteflicka": ("tj.flicka", "tjänstefl."), "järnarbetare": ("järnarb.",),
           "grovarbetare": ("grovarb.", "grofarb."), "gruvarbetare": ("gruvarb.", "grufarb."), "sjöman": ("sjöm.",),
           "handlande": ("handl.", "hdl."), "mjölnare": ("mjöln.",)},
    "nl": {"arbeider": ("arb.", "arbr.", "arbdr"), "dagloner": ("dagl.", "daglr."),
           "landbouwer": ("landb.", "landbr.", "lndb."), "dienstmeid": ("dienstm.", "dstmeid", "d. meid"),
           "timmerman": ("timm.", "timmerm.", "tmn"), "schoenmaker": ("schoenm.", "schoenmr"),
           "kleermaker": ("kleerm.", "kleermr"), "fabrieksarbeider": ("fabr.arb.", "fabrieksarb.", "fabr. arb."),
           "landarbeider": ("landarb.", "landarbr"), "koopman": ("koopm.", "kpm."), "metselaar": ("mets.", "metsel."),
           "bakker": ("bakk.",), "dienstbode": ("dienstb.", "d.bode"), "boerenknecht": ("boerenkn.", "b. knecht"),
           "visser": ("viss.",), "werkman": ("werkm.", "wrkm."), "schipper": ("schipp.",),
           "soldaat": ("sold.", "soldt"), "winkelier": ("wink.", "winkelr")},
    "de": {"arbeiter": ("arb.", "arbtr.", "arbr"), "tagelöhner": ("tagel.", "tagelöhn.", "taglr.", "tgl."),
           "schuhmacher": ("schuhm.", "schuhmchr", "schm."), "dienstmagd": ("dienstm.", "d. magd", "dstmagd"),
           "fabrikarbeiter": ("fabr.arb.", "fabrikarb.", "fabr. arb."), "zimmermann": ("zimm.", "zimmerm.", "zmn."),
           "schneider": ("schneid.", "schndr", "schn."), "tischler": ("tischl.", "tischlr"),
           "handarbeiter": ("handarb.", "h. arb."), "bergmann": ("bergm.", "bgm."), "landwirt": ("landw.", "ldw."),
           "kaufmann": ("kaufm.", "kfm."), "maurer": ("maur.",), "weber": ("web.",), "soldat": ("sold.",),
           "müller": ("müll.", "mllr"), "fleischer": ("fleisch.", "flschr"), "gastwirt": ("gastw.", "gstw."),
           "ackermann": ("ackerm.", "ackm.")},
    "fr": {"cultivateur": ("cult.", "cultiv.", "cultr", "cultivr"),
           "journalier": ("journ.", "journal.", "jalier", "journr"), "domestique": ("dom.", "domest.", "domque"),
           "cordonnier": ("cordon.", "cordr", "cordnier"), "tisserand": ("tiss.", "tissd", "tisserd"),
           "menuisier": ("menuis.", "menr", "menuisr"), "négociant": ("négoc.", "négt", "négt."),
           "couturière": ("coutur.", "coutre", "couture."), "laboureur": ("lab.", "labr", "laboureur."),
           "charpentier": ("charp.", "charpr"), "marchand": ("md", "md.", "march.", "marchd"),
           "propriétaire d'usine": ("prop. d'usine",), "boulanger": ("boul.", "boulr"), "maçon": ("maç.", "mçon"),
           "manouvrier": ("manouv.", "manr"), "tailleur d'habits": ("taill. d'habits", "tailr d'hab."),
           "vigneron": ("vign.", "vignon"), "employé de bureau": ("empl. de bureau", "empé de bau"),
           "blanchisseuse": ("blanch.", "blanchse"), "servante": ("serv.", "servte"),
           "ouvrier agricole": ("ouv. agr.", "ouvr. agric.")},
}
