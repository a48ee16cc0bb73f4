"""Posts.xml as Stack Exchange publishes it."""

from xml.sax.saxutils import quoteattr


def post(**attributes):
    """Returns the row of a post; line breaks within are escaped, as there."""
    words = " ".join(f"{name}={quoteattr(str(value))}" for name, value in attributes.items())
    return "  <row " + words.replace("\n", "&#xA;") + " />\r\n"


def question(number, title, body, **more):
    common = {"CreationDate": "2010-08-02T15:38:23.067", "Score": 3, "ContentLicense": "CC BY-SA 2.5"}
    return post(Id=number, PostTypeId=1, **(common | {"Body": body, "Title": title} | more))


def answer(number, parent, body, score=0, **more):
    common = {"CreationDate": "2011-08-02T15:38:23.067", "Score": score, "Body": body}
    return post(Id=number, PostTypeId=2, ParentId=parent, **(common | more))


def posts(rows):
    """Returns the bytes of a dump."""
    return (
        '\ufeff<?xml version="1.0" encoding="utf-8"?>\r\n<posts>\r\n' + "".join(rows) + "</posts>"
    ).encode()
