#!/usr/bin/env bash
# books.sh FROM TO: the texts that tales learnt from, as they were given to the trainer. FROM is a
# folder of books in Markdown (one file each); TO gets learn/ and held_out/. Lines end as in Unix,
# title pages, emphasis and curly quotation marks go: the same words with fewer kinds of tokens.
set -eu
from=$1 to=$2
mkdir -p "$to/learn" "$to/held_out"
for book in "$from"/*.md; do
  name=$(basename "$book" .md)
  [ "$name" = README ] && continue
  part=learn
  case $name in
  *Ozma_of_Oz | *Book_of_Dragons | *Silver_Blaze | *Princess_and_the_Goblin) part=held_out ;;
  esac
  tr -d '\r_' < "$book" | LC_ALL=C sed -e '1,/^-------/d' -e 's/\xe2\x80[\x9c\x9d]/"/g' \
    -e "s/\xe2\x80[\x98\x99]/'/g" -e 's/\xe2\x80\x94/--/g' -e 's/\xe2\x80\xa6/.../g' \
    -e 's/\xe2\x80\x8b//g' -e 's/\xe2\x81\xa0//g' \
    -e 's/ *$//' -e 's/^##*  */## /' | cat -s > "$to/$part/${name##*_-_}.txt"
done
