# What a script finds in place of programs. Bash reads this before the script, where it can start, write and reach nothing
# (closed.py). Descriptor 251 gives the script and the files that it reads; descriptor 250 takes what it starts.
#
# A value that is not known is a mark around a name: \2 for a variable that is not set, \3 for the output of a program. A
# variable that is not set gets its mark while a command uses it plainly, and is unset in tests and where it has a default.

builtin enable -n enable
shopt -s extdebug
FUNCNEST=200
declare -A __forced=() __files=() __saved=()
declare -a __marked=() __before=() __SOURCE=() __arguments=("$@")
__count=0 __inside=1 __target='' __instead='' __depth=0 __numbered=1

# Write one record: its kind, and words. Each word is a write of its own, so that records of two processes may mix.
__put() {
    local __word __id
    __id=$BASHPID.$((++__count))
    for __word; do
        printf '%s:%s\0' "$__id" "$__word"
    done >&250
    printf '%s;\0' "$__id" >&250
}

# Record a program with its words, the launchers before it, and the variables that programs take sizes from.
__record() {
    local __name
    local -a __set=()
    for __name in NPROC_PER_NODE NNODES WORLD_SIZE CUDA_VISIBLE_DEVICES; do
        [[ -n ${!__name-} ]] && __set+=("$__name=${!__name}")
    done
    __put run "${#__set[@]}" "${__set[@]}" "${__before[@]}" "$@"
    printf '\3%s\3' "${__target:-\$(${1##*/})}"
}

__program() {
    local __inside=1 __place __word
    case ${1##*/} in
    bash | sh | zsh | dash | sbatch) __shell "$@" && return ;;
    ssh | pdsh | pssh | clush) __remote "$@" && return ;;
    esac
    for ((__place = 2; __place <= $#; __place++)); do
        __word=${!__place}
        [[ $__word == *.py || $__word == -m ]] && break
        case ${__word##*/} in
        bash | sh | zsh | dash) (__before+=("${@:1:__place-1}") && __shell "${@:__place}") && return ;;
        esac
    done
    __record "$@"
}

# Evaluate what a shell is started with: -c TEXT, a file, or its standard input. Fails if it is none of these.
__shell() {
    local __text='' __path='' __name=${1##*/}
    shift
    while [[ ${1-} == [-+]* ]]; do
        case $__name:$1 in
        *:--*) ;;
        sbatch:-?) shift ;;
        sbatch:*) ;;
        *:-*c)
            (__evaluate "$2" "${@:3}")
            return 0
            ;;
        *:[-+][oO]) shift ;;
        esac
        shift
    done
    if (($#)); then
        [[ $1 == *.sh || $1 == */* || -f $1 ]] || return 1
        __fetch "$1" && (__evaluate "$__text" "$@")
    else
        IFS= read -r -d '' __text || [[ -n $__text ]] && (__evaluate "$__text" bash)
    fi
    return 0
}

# Evaluate the command that another machine runs: the words after the options and the name of the machine.
__remote() {
    local __name=${1##*/}
    shift
    while [[ ${1-} == -* ]]; do
        [[ $1 == -[1246AaCfGgKkMNnqsTtVvXxYySR] ]] || shift
        shift
    done
    [[ $__name == ssh ]] && shift
    (($#)) || return 1
    (__evaluate "$*" bash)
}

# Evaluate a text as a script of its own, with its name and its arguments.
__evaluate() {
    local __inside='' __depth=-1 __numbered='' __body=$1
    shift
    BASH_ARGV0=${1-bash}
    __SOURCE=("${1-}")
    (($#)) && shift
    local -a __arguments=("$@")
    eval "$__body"
}

# Set __text to the text of a file, if the reader has given it; ask for it otherwise.
__fetch() {
    __path=$1
    [[ $__path == /* ]] || __path=$PWD/$__path
    if [[ -z ${__files[$__path]+given} ]]; then
        __put need "$__path"
        return 1
    fi
    __text=${__files[$__path]}
}

# Without arguments of its own, a file has those of the function or script that reads it.
source() {
    local __inside=1 __text='' __path='' __body __depth=-1 __numbered='' __frame=1 __first __number
    __fetch "$1" || return 0
    local -a __SOURCE=("$__path" "${__SOURCE[@]}")
    __body=$__text
    shift
    [[ ${FUNCNAME[1]-} == . ]] && __frame=2
    if (($#)); then
        local -a __arguments=("$@")
    elif [[ ${FUNCNAME[__frame]-source} != source ]]; then
        __first=0
        for ((__number = 0; __number < __frame; __number++)); do __first=$((__first + BASH_ARGC[__number])); done
        local -a __arguments=()
        for ((__number = BASH_ARGC[__frame]; __number > 0; __number--)); do
            __arguments+=("${BASH_ARGV[__first + __number - 1]}")
        done
    else
        __depth=${#FUNCNAME[@]}
    fi
    set -- "${__arguments[@]}"
    __inside=''
    eval "$__body"
}
function . {
    local __inside=1
    source "$@"
}

# A script that stops before it trains, because a file or a variable is missing here, is read on.
exit() {
    local __inside=1
    ((BASH_SUBSHELL)) && builtin exit "$@"
    __put exit "${__numbered:+${BASH_LINENO[0]}}"
}
cd() {
    local __inside=1
    builtin cd "$@" || return 0
}
pushd() { cd "$@"; }
sleep() { return 0; }
ulimit() { return 0; }
command_not_found_handle() { __program "$@"; }

# Small programs whose output follows from their words and input. Of others, it is a mark.

__mark_in() { # a mark within the words or texts, or else one for the output of a program with the name $1
    local __inside=1 __all=$*
    [[ $__all =~ [$'\2\3'][^$'\2\3']*[$'\2\3'] ]] && printf '%s\n' "${BASH_REMATCH[0]}" && return
    printf '\3%s\3\n' "${__target:-\$($1)}"
}
__input() { # all of the standard input, without the last line's end
    IFS= read -r -d '' __text
    __text=${__text%$'\n'}
}
dirname() {
    local __inside=1 __path
    while [[ ${1-} == -* ]]; do shift; done
    __path=${1%/}
    case $__path in
    */*) __path=${__path%/*} && printf '%s\n' "${__path:-/}" ;;
    *) printf '.\n' ;;
    esac
}
basename() {
    local __inside=1 __path
    while [[ ${1-} == -* ]]; do shift; done
    __path=${1%/}
    __path=${__path##*/}
    [[ -z ${2-} || $__path == "$2" ]] || __path=${__path%"$2"}
    printf '%s\n' "$__path"
}
realpath() {
    local __inside=1 __path=${!#}
    [[ $__path == /* ]] || __path=$PWD/$__path
    printf '%s\n' "$__path"
}
readlink() { realpath "$@"; }
seq() {
    local __inside=1 __first=1 __step=1 __last __number
    case $# in
    1) __last=$1 ;;
    2) __first=$1 __last=$2 ;;
    3) __first=$1 __step=$2 __last=$3 ;;
    esac
    if [[ ! "$__first $__step ${__last-}" =~ ^-?[0-9]+\ -?[1-9][0-9]*\ -?[0-9]+$ ]]; then
        __mark_in seq "$@"
        return
    fi
    for ((__number = __first; __step > 0 ? __number <= __last : __number >= __last; __number += __step)); do
        printf '%s\n' "$__number"
    done
}
expr() {
    local __inside=1 __text=$*
    if [[ $__text =~ ^[-0-9\ +*/%()]+$ ]]; then printf '%s\n' "$((__text))"; else __mark_in expr "$@"; fi
}
bc() {
    local __inside=1 __text
    __input
    if [[ $__text =~ ^[-0-9\ +*/%()]+$ ]]; then printf '%s\n' "$((__text))"; else __mark_in bc "$__text"; fi
}
date() {
    local __inside=1
    if [[ $# == 1 && $1 == +* ]]; then printf "%(${1#+})T\n" -1; else printf '%(%c)T\n' -1; fi
}
cat() {
    local __inside=1 __text='' __path='' __file
    for __file in "${@:--}"; do
        if [[ $__file == - ]]; then
            IFS= read -r -d '' __text
            printf '%s' "$__text"
        elif [[ $__file != -* ]]; then
            if __fetch "$__file"; then printf '%s' "$__text"; else __mark_in cat "$__file"; fi
        fi
    done
}
tee() {
    local __inside=1
    cat
}
head() {
    local __inside=1 __text __number=${*//[!0-9]/}
    __input
    mapfile -t -n "${__number:-10}" __lines <<<"$__text"
    printf '%s\n' "${__lines[@]}"
}
tail() {
    local __inside=1 __text __number=${*//[!0-9]/}
    __input
    mapfile -t __lines <<<"$__text"
    __number=$((${#__lines[@]} - ${__number:-10}))
    printf '%s\n' "${__lines[@]:__number > 0 ? __number : 0}"
}
wc() {
    local __inside=1 __text
    local -a __words
    __input
    if [[ $__text == *[$'\2\3']* || $# != 1 ]]; then
        __mark_in wc "$__text"
        return
    fi
    case $1 in
    -l) mapfile -t __words <<<"$__text" ;;
    -w) read -r -d '' -a __words <<<"$__text" ;;
    *) __mark_in wc && return ;;
    esac
    printf '%s\n' "${#__words[@]}"
}
tr() {
    local __inside=1 __text __to
    __input
    printf -v __to '%b' "${2-}"
    case $#:$1 in
    2:-d) if [[ ${#__to} == 1 ]]; then printf '%s\n' "${__text//"$__to"/}"; else __mark_in tr "$__text"; fi ;;
    2:'[:upper:]' | 2:A-Z) printf '%s\n' "${__text,,}" ;;
    2:'[:lower:]' | 2:a-z) printf '%s\n' "${__text^^}" ;;
    2:?) if [[ ${#__to} == 1 ]]; then printf '%s\n' "${__text//"$1"/"$__to"}"; else __mark_in tr "$__text"; fi ;;
    *) __mark_in tr "$__text" ;;
    esac
}
cut() {
    local __inside=1 __text __by=$'\t' __field='' __line
    local -a __parts
    __input
    while (($#)); do
        case $1 in
        -d | -f) [[ $1 == -d ]] && __by=$2 || __field=$2; shift ;;
        -d*) __by=${1#-d} ;;
        -f*) __field=${1#-f} ;;
        esac
        shift
    done
    if [[ $__text == *[$'\2\3']* || ! $__field =~ ^[1-9][0-9]*$ ]]; then
        __mark_in cut "$__text"
        return
    fi
    while IFS= read -r __line; do
        IFS=$__by read -r -a __parts <<<"$__line"
        printf '%s\n' "${__parts[__field - 1]-}"
    done <<<"$__text"
}

# Before each command: its text, the number of arguments, the depth of functions, the line.

__is_unset() { [[ ! -v $1 ]] && ! declare -p "$1" >/dev/null 2>&1; }

__watch() {
    local __name __value __text=$1 __rest __following __kind=command __skip=0
    set +eux
    for __name in "${!__saved[@]}"; do
        printf -v "$__name" '%s' "${__saved[$__name]}"
    done
    for __name in "${__marked[@]}"; do
        [[ ${!__name-} == $'\2'$__name$'\2' ]] && unset -v "$__name"
    done
    __saved=() __marked=()
    for __name in "${!__forced[@]}"; do
        printf -v "$__name" '%s' "${__forced[$__name]}"
    done
    PATH=/dev/null
    if [[ $__text =~ ^((export|local|declare|readonly|typeset)\ +(-[A-Za-z]+\ +)*)?([A-Za-z_][A-Za-z_0-9]*)\+?= ]]; then
        __target=${BASH_REMATCH[4]}
    elif ((BASH_SUBSHELL == 0)); then
        __target=''
    fi
    case $__text in
    '[ '* | '[['* | 'test '* | 'case '* | 'for '* | 'select '*) __kind=test ;;
    '(('* | 'let '*)
        __kind=test
        if [[ $__text =~ ^(\(\(|let\ )[\ \"\']*([A-Za-z_][A-Za-z_0-9]*)\ *([-+*/%&|^]|'<<'|'>>')?=([^=].*)$ ]]; then
            __target=${BASH_REMATCH[2]} __value='' __rest=${BASH_REMATCH[3]}
            __unknown_in "${BASH_REMATCH[4]}" "$__target" && __instead="$__target=\$'$__value'" && return 1
            [[ -n $__rest && ${!__target-} == *[$'\2\3']* ]] && __instead=: && return 1
        fi
        ;;
    'exec '[A-Za-z\"\'\$./]*)
        __text=${__text#exec } __skip=1
        ;;
    esac
    __rest=$__text
    while [[ $__rest =~ \$(\{?)([A-Za-z_][A-Za-z_0-9]*|[1-9][0-9]*) ]]; do
        __rest=${__rest#*"${BASH_REMATCH[0]}"}
        __following=${BASH_REMATCH[1]}
        __name=${BASH_REMATCH[2]}
        __reference=${BASH_REMATCH[0]}
        [[ $__name == __* ]] && continue
        if [[ $__name == [1-9]?* && -z $__following ]]; then # $10 is $1, and a 0
            __name=${__name:0:1} __reference="\$$__name"
        fi
        if [[ -n $__following ]]; then
            case ${__rest:0:2} in
            '}'* | ':'[0-9\ ?] | '?'* | [%#/^,@]*) [[ ${__rest:0:1} == '}' ]] && __reference+='}' ;;
            *) continue ;;
            esac
        fi
        if [[ $__name == [1-9]* ]]; then
            (($3 == __depth && $2 < __name)) || continue
            if [[ $__kind == test ]]; then
                __put compared "$__name" "${__numbered:+$4}"
            elif [[ $__reference != '${'* || $__reference == *'}' ]]; then
                __text=${__text//"$__reference"/$'\2'$__name$'\2'} __skip=1
            fi
        elif [[ $__kind == test ]]; then
            __compare "$__name" "$4"
        elif __is_unset "$__name"; then
            printf -v "$__name" '\2%s\2' "$__name"
            __marked+=("$__name")
        fi
    done
    if [[ $__kind == test && $__text == *'(('* ]]; then
        __rest=$__text
        while [[ $__rest =~ [A-Za-z_][A-Za-z_0-9]* ]]; do
            __rest=${__rest#*"${BASH_REMATCH[0]}"}
            [[ ${!BASH_REMATCH[0]-} == *[$'\2\3']* ]] && __compare "${BASH_REMATCH[0]}" "$4"
        done
    elif [[ $__text == *'$(('* ]]; then
        __without_unknown_sums "$__text" && __text=$__without && __skip=1
    fi
    if ((__skip)); then
        __instead=$__text
        [[ $1 == 'exec '* ]] && __instead+='; __put end; builtin exit'
        return 1
    fi
}

# A test sees a variable that is not set as bash does; the marks of such variables are taken out of values meanwhile.
__compare() {
    local __value
    if __is_unset "$1"; then
        __put compared "$1" "${__numbered:+$2}"
        return
    fi
    __value=${!1-}
    [[ $__value == *[$'\2\3']* ]] || return
    __put compared "$(__named_in "$__value")" "${__numbered:+$2}"
    [[ $__value == *$'\2'* && -z ${__saved[$1]+saved} ]] || return
    __saved[$1]=$__value
    while [[ $__value =~ $'\2'[^$'\2']*$'\2' ]]; do
        __value=${__value/"${BASH_REMATCH[0]}"/}
    done
    printf -v "$1" '%s' "$__value"
}
__named_in() { [[ $1 =~ [$'\2\3']([^$'\2\3']*)[$'\2\3'] ]] && printf '%s' "${BASH_REMATCH[1]}"; }

# Set __value to the mark of an unknown value in an arithmetic expression; $2 is a variable that may be unset.
__unknown_in() {
    local __sum=$1 __name __before
    if [[ $__sum =~ [$'\2\3'][^$'\2\3']*[$'\2\3'] ]]; then
        __value=${BASH_REMATCH[0]}
        return 0
    fi
    while [[ $__sum =~ (^|[^A-Za-z_0-9])([A-Za-z_][A-Za-z_0-9]*)(:-)? ]]; do
        __name=${BASH_REMATCH[2]}
        __before=${BASH_REMATCH[3]}
        __sum=${__sum#*"${BASH_REMATCH[0]}"}
        if [[ ${!__name-} =~ [$'\2\3'][^$'\2\3']*[$'\2\3'] ]]; then
            __value=${BASH_REMATCH[0]}
            return 0
        elif [[ -z $__before && $__name != "$2" && $__name != RANDOM ]] && __is_unset "$__name"; then
            __value=$'\2'$__name$'\2'
            return 0
        fi
    done
    return 1
}

# Set __without to a command in which sums of unknown values are marks. Fails if there are none.
__without_unknown_sums() {
    local __rest=$1 __sum __depth __place __changed=1
    __without=''
    while [[ $__rest == *'$(('* ]]; do
        __without+=${__rest%%'$(('*}
        __rest=${__rest#*'$(('}
        __depth=2
        for ((__place = 0; __place < ${#__rest} && __depth; __place++)); do
            case ${__rest:__place:1} in
            '(') ((__depth++)) ;;
            ')') ((__depth--)) ;;
            esac
        done
        __sum=${__rest:0:__place}
        __rest=${__rest:__place}
        if __unknown_in "$__sum" "$__target"; then
            __without+=$__value __changed=0
        else
            __without+="\$(($__sum"
        fi
    done
    __without+=$__rest
    return "$__changed"
}

__take() { # the next text of descriptor 251
    __taken=${__texts[__at++]-}
}
mapfile -d '' -t -u 251 __texts
__at=0
__take
for ((__number = __taken; __number > 0; __number--)); do
    __take && __name=$__taken
    __take && __forced[$__name]=$__taken && export "$__name=$__taken"
done
__take
for ((__number = __taken; __number > 0; __number--)); do
    __take && __name=$__taken
    __take && export "$__name=$__taken"
done
__take
for ((__number = __taken; __number > 0; __number--)); do
    __take && eval "function $__taken { __program '$__taken' \"\$@\"; }"
done
__take
for ((__number = __taken; __number > 0; __number--)); do
    __take && __name=$__taken
    __take && __files[$__name]=$__taken
done
__take
__SOURCE=("$0")
unset -v __texts __name __number
trap 'set +eux; [[ -n $__inside || $BASH_COMMAND == __* || $BASH_COMMAND == "local __inside"* ]] || __watch "$BASH_COMMAND" $# ${#FUNCNAME[@]} $LINENO || { eval "$__instead"; ! :; }' DEBUG
__put line "$((LINENO + 2))"
__inside=''
eval "$__taken"
__put end
