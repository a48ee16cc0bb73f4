"""The scripts that `completion` prints: each asks `leyden completion words -- WORD...` for what may come next.

The words are those after `leyden` or `python -m core`, the last one as far as it is typed. A line of the
answer is a candidate, a tab, and what it is.
"""

BASH = r"""# leyden: completion for bash 4.4 and newer
_leyden_complete() {  # $1: the program to ask; the rest: the words so far
    local program=$1 breaks=${COMP_WORDBREAKS//[^=:]/} current=${!#} known="" candidate
    # bash takes what stands before the last `=` or `:` for words of their own
    [[ -n $breaks ]] && known=${current%"${current##*[$breaks]}"}
    COMPREPLY=()
    while IFS=$'\t' read -r candidate _; do
        printf -v candidate %q "${candidate#"$known"}"
        COMPREPLY+=("$candidate")
    done < <("$program" completion words -- "${@:2}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
}

_leyden_words() {  # sets `words`: the line up to the cursor, cut at spaces alone
    local line=${COMP_LINE:0:COMP_POINT}
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
}

_leyden() {
    local -a words
    _leyden_words
    _leyden_complete "$1" "${words[@]:1}"
}

_leyden_python() {
    local -a words
    _leyden_words
    if [[ ${words[1]} == -m && ${words[2]} == core && ${#words[@]} -gt 3 ]]; then
        local folder=""
        [[ $1 == */* ]] && folder=${1%/*}/
        _leyden_complete "${folder}leyden" "${words[@]:3}"
    elif [[ -n $_leyden_python_before ]]; then
        "$_leyden_python_before" "$@"
    else
        compopt -o default
    fi
}

declare -F _completion_loader > /dev/null && _completion_loader python
_leyden_python_before=$(complete -p python 2> /dev/null | sed -n 's/.* -F \([^ ]*\) .*/\1/p')
[[ $_leyden_python_before == _leyden_python ]] && _leyden_python_before=""
complete -F _leyden leyden
complete -F _leyden_python python python3
"""

ZSH = r"""# leyden: completion for zsh 5
_leyden_complete() {  # $1: the program to ask; the rest: the words so far
    local line
    local -a plain shown_plain open shown_open
    for line in ${(f)"$($1 completion words -- "${@[2,-1]}" 2> /dev/null)"}; do
        local candidate=${line%%$'\t'*} text=${line#*$'\t'}
        local shown=$candidate${text:+  -- $text}
        if [[ $candidate == *[=./] ]]; then
            open+=("$candidate") shown_open+=("$shown")
        else
            plain+=("$candidate") shown_plain+=("$shown")
        fi
    done
    compadd -l -d shown_plain -a plain
    compadd -l -S '' -d shown_open -a open
}

_leyden() {
    _leyden_complete $words[1] "${(@)words[2,CURRENT-1]}" "$PREFIX"
}

_leyden_python() {
    if [[ $words[2] == -m && $words[3] == core && $CURRENT -gt 3 ]]; then
        local folder=""
        [[ $words[1] == */* ]] && folder=${words[1]%/*}/
        _leyden_complete ${folder}leyden "${(@)words[4,CURRENT-1]}" "$PREFIX"
    else
        _python "$@"
    fi
}

autoload -Uz _python
compdef _leyden leyden
compdef _leyden_python python python3
"""

FISH = r"""# leyden: completion for fish 3
function __leyden_candidates
    set -l words (commandline -opc)
    set -l program $words[1]
    set -l first 2
    if string match -qr '^(.*/)?python[0-9.]*$' -- $program
        set program (string replace -r '[^/]*$' leyden -- $program)
        set first 4
    end
    set -l rest
    test (count $words) -ge $first; and set rest $words[$first..-1]
    $program completion words -- $rest (commandline -ct) 2>/dev/null
end

function __leyden_is_core
    set -l words (commandline -opc)
    test (count $words) -ge 3; and test "$words[2] $words[3]" = '-m core'
end

complete -c leyden -f -a '(__leyden_candidates)'
for python in python python3
    complete -c $python -n __leyden_is_core -f -a '(__leyden_candidates)'
end
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
