"""Books as the tests need them: EPUB files, and PDF files written by hand."""

import zipfile
import zlib

CONTAINER = (
    '<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
    '<rootfiles><rootfile full-path="{}" media-type="application/oebps-package+xml"/></rootfiles></container>'
)
METADATA = (
    "<dc:title>A  Title</dc:title><dc:creator>Ann A.</dc:creator><dc:creator>Bob B.</dc:creator>"
    "<dc:language>en-GB</dc:language><dc:date>1897-05-26T00:00:00</dc:date><dc:identifier>urn:x:1</dc:identifier>"
)

ENCRYPTED = (
    '<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container" xmlns:e="http://www.w3.org/2001/04/xmlenc#">'
    '<e:EncryptedData><e:CipherData><e:CipherReference URI="{}"/></e:CipherData></e:EncryptedData></encryption>'
)


def xhtml(body, head="<title/>"):
    return (
        '<?xml version="1.0" encoding="utf-8"?><html xmlns="http://www.w3.org/1999/xhtml"><head>'
        f"{head}</head><body>{body}</body></html>"
    )


def package(chapters, metadata=METADATA, spine=None):
    """Returns a package document that lists chapters, (id, href, properties) each."""
    items = "".join(
        f'<item id="{name}" href="{href}" media-type="application/xhtml+xml" properties="{more}"/>'
        for name, href, more in chapters
    )
    order = "".join(f'<itemref idref="{name}"/>' for name in spine or [name for name, *_ in chapters])
    return (
        '<?xml version="1.0"?><package version="3.0" xmlns="http://www.idpf.org/2007/opf">'
        f'<metadata xmlns:dc="http://purl.org/dc/elements/1.1/">{metadata}</metadata>'
        f'<manifest>{items}<item id="i" href="cover.jpg" media-type="image/jpeg"/></manifest><spine>{order}</spine></package>'
    )


def write_zip(path, files, compression=zipfile.ZIP_DEFLATED):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return path


def epub(path, texts, more=None, **options):
    """Writes a book with a paragraph for each chapter, `more` being further files of the archive."""
    chapters = [(f"c{number}", f"text/c%20{number}.xhtml", "") for number in range(len(texts))]
    files = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER.format("OEBPS/book.opf")}
    files["OEBPS/book.opf"] = package(chapters, **options)
    files |= {
        f"OEBPS/text/c {number}.xhtml": xhtml(f"<h1>{number}</h1><p>{text}</p>")
        for number, text in enumerate(texts)
    }
    return write_zip(path, files | (more or {}))


def pdf(pages, compress=False):
    """Returns a PDF file; each page is a list of (x, y, text), or the bytes of its content stream."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for page in pages:
        drawn = page if isinstance(page, bytes) else b"".join(
            b"BT /F1 12 Tf %d %d Td (%s) Tj ET\n"
            % (x, y, text.encode("cp1252").replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)"))
            for x, y, text in page
        )  # fmt: skip
        how = b" /Filter /FlateDecode" if compress else b""
        drawn = zlib.compress(drawn) if compress else drawn
        objects.append(b"<< /Length %d%s >>\nstream\n%s\nendstream" % (len(drawn), how, drawn))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % len(objects)
        )
    kids = b" ".join(b"%d 0 R" % (5 + 2 * number) for number in range(len(pages)))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(pages))
    out, places = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    trailer = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(out))
    return out + head + trailer


def lines(*texts):
    """Returns a page with these lines, from the top."""
    return [(50, 740 - 15 * number, text) for number, text in enumerate(texts)]
