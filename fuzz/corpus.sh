#!/bin/sh
# The committed inputs of a target are the lines of corpus/TARGET.hex, in hexadecimal digits; libFuzzer wants files.
# sh fuzz/corpus.sh unpack TARGET       makes unpacked/TARGET of them
# sh fuzz/corpus.sh pack TARGET DIR     makes corpus/TARGET.hex of the files in DIR (relative to fuzz/), the shortest first
set -eu
cd "$(dirname "$0")"
case ${1:-} in
unpack)
    rm -rf "unpacked/$2"
    mkdir -p "unpacked/$2"
    [ ! -e "corpus/$2.hex" ] || perl -ne '
        BEGIN { $directory = shift }
        chomp;
        open my $file, ">", "$directory/$." or die "$directory/$.: $!\n";
        print $file pack "H*", $_ or die "$directory/$.: $!\n";
        close $file or die "$directory/$.: $!\n"' "unpacked/$2" "corpus/$2.hex"
    ;;
pack)
    [ -n "$(ls "$3")" ]
    for input in "$3"/*; do perl -0777 -ne 'print unpack("H*", $_), "\n"' "$input"; done |
        sort -u | awk '{ print length($0), $0 }' | sort -n | cut -d" " -f2 >"corpus/$2.hex"
    ;;
*) echo "usage: sh fuzz/corpus.sh unpack TARGET | pack TARGET DIR" >&2; exit 2 ;;
esac
