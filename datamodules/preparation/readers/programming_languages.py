"""Programming languages by the names of files, as GitHub's linguist names them."""

from __future__ import annotations

_EXTENSIONS = {
    "Ada": "adb ads ada",
    "Agda": "agda",
    "ANTLR": "g4",
    "AppleScript": "applescript",
    "Assembly": "asm nasm s",
    "Awk": "awk gawk mawk",
    "Batchfile": "bat cmd",
    "Bluespec": "bsv",
    "C": "c h",
    "C#": "cs csx",
    "C++": "cpp c++ cc cxx hpp hh hxx h++ inl ipp tcc tpp",
    "Clojure": "clj cljc cljs",
    "CMake": "cmake",
    "CoffeeScript": "coffee",
    "Common Lisp": "lisp asd lsp",
    "Coq": "coq",
    "Crystal": "cr",
    "CSS": "css",
    "Cuda": "cu cuh",
    "Cython": "pyx pxd pxi",
    "D": "d di",
    "Dart": "dart",
    "Dockerfile": "dockerfile",
    "Elixir": "ex exs",
    "Elm": "elm",
    "Emacs Lisp": "el",
    "Erlang": "erl hrl",
    "F#": "fs fsi fsx",
    "Fortran": "f f77 f90 f95 f03 f08 for fpp",
    "GLSL": "glsl frag vert geom",
    "Go": "go",
    "GraphQL": "graphql",
    "Groovy": "groovy gradle",
    "Haskell": "hs hsc",
    "HCL": "hcl tf",
    "HTML": "html htm xhtml",
    "Idris": "idr",
    "Isabelle": "thy",
    "Java": "java",
    "Java Server Pages": "jsp",
    "JavaScript": "js jsx mjs cjs es6",
    "Julia": "jl",
    "Kotlin": "kt kts",
    "Lean": "lean",
    "Less": "less",
    "Lua": "lua",
    "Makefile": "mk mak makefile",
    "Markdown": "md markdown",
    "Mathematica": "wl wlt",
    "MATLAB": "matlab",
    "Nim": "nim",
    "Nix": "nix",
    "Objective-C++": "mm",
    "OCaml": "ml mli mll mly",
    "Pascal": "pas dpr lpr",
    "Perl": "pl pm perl",
    "PHP": "php php3 php4 php5 phps",
    "PowerShell": "ps1 psd1 psm1",
    "Prolog": "prolog",
    "Protocol Buffer": "proto",
    "PureScript": "purs",
    "Python": "py pyi pyw bzl wsgi",
    "R": "r",
    "Racket": "rkt",
    "reStructuredText": "rst",
    "Ruby": "rb gemspec rake ru podspec",
    "Rust": "rs",
    "SAS": "sas",
    "Scala": "scala sbt",
    "Scheme": "scm sld sps ss",
    "SCSS": "scss",
    "Shell": "sh bash bats ksh zsh",
    "Smalltalk": "st",
    "Solidity": "sol",
    "SQL": "sql ddl plsql",
    "Stan": "stan",
    "Standard ML": "sml sig",
    "Stata": "do ado",
    "Swift": "swift",
    "SystemVerilog": "sv svh",
    "Tcl": "tcl",
    "TeX": "tex sty ltx cls",
    "Thrift": "thrift",
    "TypeScript": "ts tsx mts cts",
    "Verilog": "v vh",
    "VHDL": "vhdl vhd",
    "Vim Script": "vim",
    "Visual Basic": "vb bas vbs",
    "Vue": "vue",
    "Yacc": "y yacc yy",
    "Zig": "zig",
}
"""Language -> extensions; data formats such as JSON are left out. A script of Objective-C (.m) may be one of MATLAB: also out."""

_NAMES = {
    "makefile": "Makefile",
    "gnumakefile": "Makefile",
    "dockerfile": "Dockerfile",
    "cmakelists.txt": "CMake",
    "rakefile": "Ruby",
    "gemfile": "Ruby",
    "sconstruct": "Python",
    "jenkinsfile": "Groovy",
}
_BY_EXTENSION = {one: name for name, extensions in _EXTENSIONS.items() for one in extensions.split()}

LANGUAGES = frozenset(_EXTENSIONS)
SUFFIXES = (*(f".{extension}" for extension in _BY_EXTENSION), *_NAMES)
"""Endings of the names of all files of these languages, in lower case."""


def language_of(name: str) -> str | None:
    """Returns the language of a file by its name, without its folder; None if it is none of these."""
    lower = name.lower()
    if known := _NAMES.get(lower):
        return known
    _, dot, extension = lower.rpartition(".")
    return _BY_EXTENSION.get(extension) if dot else None
