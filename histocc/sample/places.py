"""Where people of a register live and for whom they work, by language.

Keys are the columns of occupations.csv; `{}` stands for what is before, `@` for a town or a person. An employer says
nothing about what is done, so that it changes no code: which employers go with which codes is in `EMPLOYED`.
"""

TOWNS = {
    "en": ("ashby", "thornby", "westbrook", "langley", "northwick", "milford", "oakham", "stanton", "bradley", "hillside",
           "kirkby", "great marston", "little marston", "eastham", "holbeck", "sutton", "wexcombe", "netherton", "aldbury",
           "redhill", "swinford", "barton", "coldwell", "hampton", "derby", "norwich", "paisley", "whitford", "longdale",
           "st. mary's", "blackwater", "upper heaton", "penrose", "crowland"),
    "da": ("odense", "nørreby", "vesterby", "aalborg", "sønderby", "holme", "ribe", "lundby", "viborg", "østerby",
           "randers", "kirkeby", "store ladager", "lille ladager", "stenløse", "hvidbjerg", "svendborg", "tranekær", "hjørring",
           "bregninge", "skovby", "horsens", "egeskov", "nykøbing", "ballerup", "lyngby", "rønne", "vejle", "sandholm",
           "klitgård", "gammelby", "møllerup", "åstrup", "bjerre"),
    "sv": ("söderby", "norrby", "lund", "västerås", "granby", "hammarby", "kalmar", "ekeby", "sundby", "vallby",
           "örebro", "östra ryd", "västra ryd", "skövde", "lillkyrka", "näs", "åkerby", "gävle", "falun", "björkvik",
           "vadstena",
           "mölltorp", "tuna", "brunnby", "hällestad", "visby", "sjöbo", "torsås", "storsjö", "umeå", "kvarnby", "linköping",
           "bergsjö", "holmestad"),
    "nl": ("oosterdam", "leiden", "noorddorp", "westerveen", "gouda", "zuidhoek", "deventer", "molenbeek", "haarlem",
           "nieuwdorp", "oudkerk", "delft", "zwolle", "hoogveen", "kleiburg", "middelharnis", "broek", "zandvoort", "breda",
           "veenhuizen", "sint-pieter", "alkmaar", "kampen", "groesbeek", "waterland", "langedijk", "venlo", "zierikzee",
           "tiel",
           "oldeberg", "heemstede", "buitenpost", "den hoorn", "sluis"),
    "de": ("altdorf", "neustadt", "kirchheim", "oberbach", "steinfeld", "grünau", "waldkirch", "niederhof", "lindenau",
           "talheim", "unterbach", "rosenthal", "königsfeld", "bergstadt", "mühlhausen", "schönberg", "weißenburg",
           "friedrichsdorf",
           "hohenstein", "eichwald", "marienthal", "langenau", "zwickau", "lübeck", "ulm", "kleinhausen", "großheim",
           "bad brunn",
           "wiesental", "sankt georgen", "münster", "buchholz", "rothenfels", "seedorf"),
    "fr": ("saint-martin", "villeneuve", "beaulieu", "montfort", "la rochette", "saint-pierre", "neuville", "bellefontaine",
           "rouen", "clairval", "montreuil", "saint-jean", "vieuxbourg", "chaumont", "fontenay", "lille", "la ferté",
           "grandchamp", "puy-saint-front", "amiens", "roubaix", "sainte-croix", "la chapelle", "pontivy", "vernon",
           "bourgneuf",
           "hautmont", "les essarts", "nantes", "champigny", "mirecourt", "valbonne", "tourcoing", "saint-aubin"),
}
IN_TOWN = {
    "en": ("{} of @", "{} in @", "{} at @", "{}, @", "{} @", "{}, parish of @"),
    "da": ("{} i @", "{} fra @", "{}, @", "{} i @ sogn", "{} af @"),
    "sv": ("{} i @", "{} från @", "{}, @", "{} i @ socken", "{} uti @"),
    "nl": ("{} te @", "{} in @", "{}, @", "{} uit @", "{}, won. te @"),
    "de": ("{} in @", "{} zu @", "{} aus @", "{}, @", "{} von @"),
    "fr": ("{} à @", "{} de @", "{}, @", "{}, dem. à @", "{} @"),
}

PEOPLE = {
    "en": ("mr. hale", "t. brand", "wm. archer", "mr. john pike", "messrs. cole bros.", "geo. whitby", "j. ramsey", "mrs. lowe",
           "sir h. vane", "jas. firth", "his father", "his brother"),
    "da": ("n. holm", "enken", "hans møller", "p. lassen", "fru krag", "jens bech", "hr. friis", "brdr. winther", "a. juhl",
           "sin fader", "broderen", "c. f. rosen"),
    "sv": ("p. lind", "änkan", "anders ek", "fru sjögren", "herr ståhl", "j. a. berg", "c. g. falk", "bröderna roos",
           "o. norén",
           "sin fader", "brodern", "er. persson"),
    "nl": ("j. de vos", "de weduwe", "p. van dam", "den heer smit", "gebr. kuiper", "h. jansen", "mevr. bakhuis", "k. de graaf",
           "zijn vader", "zijn broeder", "wed. mulder", "c. verhoef"),
    "de": ("herrn voss", "der witwe", "j. lang", "frau berger", "gebr. stark", "meister horn", "seinem vater", "seinem bruder",
           "k. friedrich", "herrn v. stein", "h. brandt", "fa. keller"),
    "fr": ("m. durand", "la veuve", "m. lefort", "mme girard", "j. morel", "mm. petit frères", "son père", "son frère",
           "p. lambert", "veuve robin", "m. de brissac", "l. carpentier"),
}

# Kinds of employer; "person" templates are filled with PEOPLE.
EMPLOYER = {
    "person": {"en": ("{} with @", "{} for @", "{} to @"), "da": ("{} hos @", "{} for @"), "sv": ("{} hos @", "{} åt @"),
               "nl": ("{} bij @", "{} voor @"), "de": ("{} bei @", "{} für @"), "fr": ("{} chez @", "{} pour @")},
    "works": {
        "en": ("{} at the mill", "{} at the old works", "{} on the estate", "{} railway works", "{} at the foundry",
               "{} in the factory", "{} at the shipyard", "{} own account"),
        "da": ("{} ved møllen", "{} på godset", "{} ved værket", "{} ved fabrikken", "{} ved jernbanen", "{} på værftet"),
        "sv": ("{} vid bruket", "{} på herrgården", "{} vid kvarnen", "{} under storgården", "{} vid järnvägen", "{} på varvet",
               "{} vid fabriken"),
        "nl": ("{} bij de molen", "{} op het landgoed", "{} aan de haven", "{} op de fabriek", "{} bij het spoor",
               "{} op de werf"),
        "de": ("{} bei der mühle", "{} auf dem gut", "{} im werk", "{} in der fabrik", "{} bei der eisenbahn",
               "{} auf der werft"),
        "fr": ("{} au moulin", "{} au château", "{} au bourg", "{} à la fabrique", "{} aux chemins de fer", "{} au chantier"),
    },
    "house": {
        "en": ("{} at the rectory", "{} at the hall", "{} at the manor house"),
        "da": ("{} på præstegården", "{} på herregården", "{} hos provsten"),
        "sv": ("{} i prästgården", "{} på herrgården", "{} hos häradshövdingen"),
        "nl": ("{} op de pastorie", "{} op het kasteel", "{} bij den burgemeester"),
        "de": ("{} im pfarrhaus", "{} im herrenhaus", "{} beim amtmann"),
        "fr": ("{} au presbytère", "{} au château", "{} chez le notaire"),
    },
    "field": {
        "en": ("{} on the estate", "{} at the home farm", "{} at manor farm", "{} at glebe farm"),
        "da": ("{} på hovedgården", "{} på godset", "{} under herregården", "{} på præstegården"),
        "sv": ("{} under säteriet", "{} på storgården", "{} på prästgården", "{} under herrgården"),
        "nl": ("{} op het landgoed", "{} op de hoeve", "{} op de pachthoeve"),
        "de": ("{} auf dem gut", "{} auf dem vorwerk", "{} auf der domäne", "{} auf dem pfarrhof"),
        "fr": ("{} au domaine", "{} à la grande ferme", "{} au château", "{} à la métairie"),
    },
    "office": {
        "en": ("{} at the works", "{} for the railway company", "{} at the colliery office", "{} at the brewery"),
        "da": ("{} ved fabrikken", "{} på godskontoret", "{} ved jernbanen", "{} ved bryggeriet"),
        "sv": ("{} vid bruket", "{} vid järnvägen", "{} på brukskontoret", "{} vid bryggeriet"),
        "nl": ("{} bij het spoor", "{} op de fabriek", "{} bij de brouwerij"),
        "de": ("{} im werk", "{} bei der eisenbahn", "{} bei der brauerei"),
        "fr": ("{} aux chemins de fer", "{} à la brasserie", "{} aux forges"),
    },
    "sea": {
        "en": ("{} on board the anna", "{} of the brig hope", "{} ss. albion", "{} (at sea)"),
        "da": ("{} på skibet anna", "{} på briggen haabet", "{} om bord", "{} til søs"),
        "sv": ("{} på skeppet anna", "{} på briggen hoppet", "{} ombord", "{} till sjöss"),
        "nl": ("{} op het schip anna", "{} op de brik hoop", "{} aan boord", "{} ter zee"),
        "de": ("{} auf dem schiff anna", "{} auf der brigg hoffnung", "{} an bord", "{} zur see"),
        "fr": ("{} sur le navire anna", "{} à bord du brick espoir", "{} à bord", "{} en mer"),
    },
    "army": {
        "en": ("{} 2nd regt.", "{} in the guards", "{}, 14th foot", "{} royal artillery"),
        "da": ("{} ved 3. regiment", "{} ved garden", "{} ved artilleriet"),
        "sv": ("{} vid livregementet", "{} vid gardet", "{} vid artilleriet"),
        "nl": ("{} bij het 3e regiment", "{} bij de artillerie", "{} bij de infanterie"),
        "de": ("{} im 3. regiment", "{} bei der artillerie", "{} bei der garde"),
        "fr": ("{} au 3e régiment", "{} dans l'artillerie", "{} de la garde"),
    },
}
# Which kinds go with codes that start so; the first line that fits counts.
EMPLOYED = (
    (("042", "043", "981", "982", "53150", "54060"), ("sea",)),
    (("5832", "5833", "5834"), ("army",)),
    (("30", "32", "33", "391"), ("office", "person")),
    (("540", "5312", "5310", "22430", "98620"), ("house", "person")),
    (("621", "622", "623", "624", "625", "627", "632"), ("field", "person")),
    (("99910", "99920"), ("person",)),
    (("72", "73", "75", "76", "77", "78", "79", "8", "90", "91", "92", "93", "94", "95", "969", "97152", "99930"),
     ("works", "person")),
)
