#!/usr/bin/env bash
# Runs the built tools as a user would: output, exit statuses, errors on stderr. Needs what `make
# examples bench` builds; uses the real model of ../shared/data where there is one.
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 skipped=0
tiny=tests/data/models/tiny
stories=../shared/data/stories260K
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

check() { # NAME COMMAND...
  local name=$1
  shift
  if "$@" > "$work/log" 2>&1; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAIL $name: $*"
    head -n 20 "$work/log"
  fi
}

status() { # EXPECTED COMMAND...: runs with stdout and stderr kept apart
  local expected=$1
  shift
  "$@" > "$work/out" 2> "$work/err" < /dev/null
  local found=$?
  [ "$found" = "$expected" ] && return
  echo "exit status $found, expected $expected"
  cat "$work/err"
  return 1
}

fails_with() { # STATUS TEXT COMMAND...: and says so on stderr, nothing on stdout
  local text=$2
  status "$1" "${@:3}" && grep -q -- "$text" "$work/err" ||
    { echo "stderr lacks \"$text\":"; cat "$work/err"; false; }
}

helps() { # TOOL
  status 0 "build/$1" --help && grep -q "Usage: $1" "$work/out" && status 0 "build/$1" --version &&
    grep -q "^$1 (transformer.h) [0-9]" "$work/out"
}

for tool in generate tokenize logits inspect bench train finetune classify batch beam look \
  perplexity convert; do
  check "$tool --help" helps "$tool"
  check "$tool, wrong option" fails_with 2 "Try" "build/$tool" --no-such-option
  check "$tool, no argument" fails_with 2 "expected" "build/$tool"
done
for tool in generate inspect perplexity; do
  check "$tool, no such model" fails_with 1 "^$tool: .*no/such" "build/$tool" no/such
done
check "hello, usage" fails_with 2 "usage" build/hello
check "hello, no such model" fails_with 1 "^hello: .*no/such" build/hello no/such prompt
check "cpp, no such model" fails_with 1 "^cpp: .*no/such" build/cpp no/such prompt
check "a number that is none" fails_with 2 "expected a whole number" build/generate $tiny -n many
check "two models" fails_with 2 "found another" build/generate $tiny $tiny
check "a context of 1e9" fails_with 1 "the model's 256" build/generate $tiny -c 1000000000
check "no template of that name" fails_with 1 "expected none, chatml" build/generate $tiny --chat \
  --template nonsense
check "an unknown type" fails_with 2 "q8_0" build/generate $tiny -w q9

# Prompts in a batch go on as each does alone, whoever is beside them and however many.
printf 'Once upon a time\nThe dog\n\nA big red ball\nOne day\n' > "$work/prompts"
in_batches() {
  local size
  for size in 1 3 16; do
    status 0 build/batch $tiny -f "$work/prompts" -b $size -n 12 || return
    grep -q '^batch: 4 prompts, [0-9]* tokens in .* tokens/s, up to' "$work/err" || return
    [ $size = 1 ] && cp "$work/out" "$work/alone"
    cmp "$work/out" "$work/alone" || return
  done
  [ "$(grep -c . "$work/alone")" -ge 4 ]
}
check "batch" in_batches
check "batch, no such file" fails_with 1 "^batch: no/such" build/batch $tiny -f no/such

# One beam is greedy; more find a text that is as probable or more.
beams() {
  status 0 build/beam $tiny -p "Once" -b 1 -n 8 && sed 's/^[^ ]*  //' "$work/out" > "$work/one" &&
    cut -d' ' -f1 "$work/out" > "$work/score" &&
    status 0 build/generate $tiny -p "Once" -n 8 -t 0 && diff "$work/out" "$work/one" &&
    status 0 build/beam $tiny -p "Once" -b 6 -n 8 &&
    [ "$(grep -c '^-[0-9.]*  Once' "$work/out")" = 6 ] &&
    cut -d' ' -f1 "$work/out" | cat - "$work/score" | sort -g | tail -n 1 |
    diff - <(head -n 1 "$work/out" | cut -d' ' -f1)
}
check "beam" beams

# Every step of every layer is told, and each head's probabilities are drawn.
looks_inside() {
  status 0 build/look $tiny -p "Once upon a time" -o "$work/attention.svg" &&
    grep -q '^    1  mid ' "$work/out" && ! grep -q NaN "$work/out" &&
    python3 -c 'import sys, xml.dom.minidom
drawn = xml.dom.minidom.parse(sys.argv[1]).getElementsByTagName("g")
steps = [line for line in open(sys.argv[2]) if " probs " in line]
sys.exit(not steps or len(drawn) % len(steps))' "$work/attention.svg" "$work/out"
}
check "look" looks_inside
check "look, a long text" fails_with 1 "tokens" build/look $tiny -p "$(seq 300)"

greedy() { status 0 build/generate "$1" -p "$2" -t 0 -n "$3"; }
check "generate" greedy $tiny "Once upon a time" 8
check "generate tells its speed" grep -q "tokens/s" "$work/err"
check "generate repeats the prompt" grep -q "^Once upon a time" "$work/out"
check "generate from BOS" greedy $tiny "" 8
check "hello" status 0 timeout 60 build/hello $tiny "Once upon a time"
check "cpp" status 0 timeout 60 build/cpp $tiny "Once upon a time"

same_seed() {
  status 0 build/generate $tiny -p Once -n 20 --seed 7 && mv "$work/out" "$work/first" &&
    status 0 build/generate $tiny -p Once -n 20 --seed 7 -j 1 && cmp "$work/out" "$work/first"
}
check "the same seed, the same text" same_seed

until_there() { # until_there PID CONDITION...: or until the process has ended
  local pid=$1
  shift
  until "$@" || ! kill -0 "$pid" 2> /dev/null; do sleep 0.05; done
}
interrupt() { # a model that is slow enough to be interrupted while it writes
  build/bench shape:stories15m --write "$work/slow.bin" || return 1
  rm -f "$work/out"
  build/generate "$work/slow.bin" --tokenizer "$work/slow.bin.tokenizer" -n 0 -t 2 -s 1 \
    > "$work/out" 2> "$work/err" &
  local pid=$!
  until_there $pid test -s "$work/out"
  kill -INT $pid
  wait $pid
  local found=$?
  [ $found = 130 ] && grep -q "tokens/s" "$work/err" && return
  echo "exit status $found"
  cat "$work/err"
  return 1
}
check "Ctrl-C" interrupt
interrupt_answer() { # the answer ends, and the conversation goes on to the end of the input
  rm -f "$work/in" "$work/out"
  mkfifo "$work/in"
  build/generate "$work/slow.bin" --tokenizer "$work/slow.bin.tokenizer" --chat --template none \
    -n 0 -t 2 < "$work/in" > "$work/out" 2> "$work/err" &
  local pid=$!
  exec 8> "$work/in"
  echo Hello >&8
  until_there $pid test -s "$work/out"
  kill -INT $pid
  until_there $pid grep -q "stopped" "$work/err"
  echo /help >&8
  exec 8>&-
  wait $pid && grep -q "stopped" "$work/err" && grep -q "/reset" "$work/err" && return
  cat "$work/err"
  return 1
}
check "Ctrl-C in a conversation" interrupt_answer
rm "$work/slow.bin"

small=(build/train README.md --layers 1 --width 32 --heads 2 --context 48 --batch 8 --steps 1200
       --save-every 400 --lr 0.01)
resumes() { # interrupted and resumed, as if nothing had happened
  rm -f "$work/err"
  "${small[@]}" -o "$work/again" > "$work/out" 2> "$work/err" &
  local pid=$!
  until_there $pid grep -sq "step 25" "$work/err"
  kill -INT $pid
  wait $pid
  local found=$?
  [ $found = 130 ] || { echo "exit status $found"; cat "$work/err"; return 1; }
  status 0 "${small[@]}" -o "$work/again" --resume -j 1 &&
    cmp "$work/whole/model.safetensors" "$work/again/model.safetensors"
}
check "train" status 0 "${small[@]}" -o "$work/whole" -j 1
check "train writes samples" test -s "$work/out" -a -s "$work/whole/samples.txt"
check "train tells the validation loss" grep -q "validation [0-9]" "$work/err"
check "train draws its losses" python3 -c 'import sys, xml.dom.minidom
assert xml.dom.minidom.parse(sys.argv[1]).getElementsByTagName("circle").length == 3' \
  "$work/whole/loss.svg"
check "train, Ctrl-C and --resume" resumes
check "train, nothing left to do" fails_with 0 "1200 steps already" "${small[@]}" \
  -o "$work/again" --resume
check "train logs every line once" python3 -c 'import json, sys
logs = [[json.loads(line) for line in open(path)] for path in sys.argv[1:]]
steps = [[row["step"] for row in log] for log in logs]
assert steps[0] == steps[1] == list(range(25, 1201, 25)), steps
differ = [a["step"] for a, b in zip(*logs) if a["loss"] != b["loss"]]
assert len(differ) < 2, differ  # the mean over the steps since the interruption
assert logs[0][-1]["validation"] < 3.3, logs[0][-1]' "$work/whole/log.jsonl" "$work/again/log.jsonl"
check "what train wrote generates" status 0 build/generate "$work/whole" -n 20
check "train, another shape" fails_with 1 "another shape" build/train README.md -o "$work/whole" \
  --resume --context 48 --steps 1200
check "train, other data" fails_with 1 "other data" "${small[@]}" -o "$work/whole" --resume \
  --seed 2
check "train, too short a text" fails_with 1 "more than the context" build/train tests/api.txt \
  --context 30000
check "train, no such text" fails_with 1 "no/such" build/train no/such
check "train, no such preset" fails_with 2 "medium" build/train README.md --preset huge
mkdir "$work/sources" && cp examples/*.[ch] "$work/sources"
books=(build/train "$work/sources" --validation "$work/sources/hello.c" --arch llama
       --tokenizer bpe:600
       --layers 1 --width 32 --heads 2 --kv-heads 1 --ffn 64 --context 32
       --batch 4 --steps 4 --generate "a b")
check "train on a folder" status 0 "${books[@]}" -o "$work/folder"
check "train begins samples" grep -q "^a b" "$work/out"
check "train --lr-find" status 0 "${books[@]}" --lr-find=3 -o "$work/folder"
check "train --lr-find, no such shape" fails_with 1 "head width" build/train README.md --lr-find=1 \
  --heads 3
check "train, no such size" fails_with 1 "found \"many\"" build/train README.md --tokenizer bpe:many
check "train --lr-find draws" test -s "$work/folder/lr.svg"

check "train, dropout and recomputation" status 0 "${small[@]}" --steps 20 --dropout 0.1 \
  --recompute --first-layer 0 --freeze norms
check "train --minutes" status 0 build/train README.md --layers 1 --width 32 --heads 2 \
  --minutes 0.02 --sample-tokens 0 -o "$work/timed"
check "train --minutes tells its steps" grep -q "0.02 minutes hold [0-9]* steps" "$work/err"
check "train --minutes and --steps" fails_with 2 "chooses the number of steps" \
  build/train README.md --minutes 1 --steps 9
check "our own model writes" status 0 build/generate examples/tales/tales.gguf -n 10
check "finetune" status 0 build/finetune "$work/folder" README.md --steps 3 --context 16 --batch 2 \
  --first-layer 1 -o "$work/tuned"
check "what finetune wrote generates" status 0 build/generate "$work/tuned" -n 5
check "finetune, no such part" fails_with 2 "no part" build/finetune "$work/folder" README.md \
  --freeze body

experts=(build/train README.md --arch moe --layers 1 --width 32 --heads 2 --context 32 --batch 4
         --experts 4 --steps 25)
check "train --arch moe" status 0 "${experts[@]}" -o "$work/experts"
check "train tells the experts' balance" grep -q "balance [1-4]\.[0-9]" "$work/err"
check "train logs the experts' balance" grep -q '"balance":[1-4]' "$work/experts/log.jsonl"
check "what train --arch moe wrote generates" status 0 build/generate "$work/experts" -n 5
check "train --arch mixtral" status 0 "${experts[@]}" --arch mixtral --steps 2 -o "$work/experts"
check "train --arch moe, dropout" fails_with 1 "no such dropout" "${experts[@]}" --dropout 0.1

moods=(build/classify examples/classify.tsv)
classifies() { # far better than chance on texts that it never saw, and the same when loaded
  status 0 "${moods[@]}" -o "$work/mood" -t "What a wonderful day!" -j 1 &&
    python3 -c 'import re, sys
found = re.search(r"held out: .*accuracy ([0-9.]+) \(\w+ \d+ of \d+, \w+ \d+ of", sys.argv[1])
assert found and float(found[1]) >= 0.75, sys.argv[1]' "$(cat "$work/err")" &&
    grep -q "^positive.0\.[0-9]*.What a wonderful day!$" "$work/out" &&
    mv "$work/out" "$work/told" &&
    status 0 build/classify --load "$work/mood" -t "What a wonderful day!" &&
    cmp "$work/out" "$work/told" &&
    echo "What a wonderful day!" | build/classify --load "$work/mood" |
      cmp - "$work/told"
}
repeats() {
  status 0 "${moods[@]}" --steps 20 -o "$work/mood1" -j 1 &&
    status 0 "${moods[@]}" --steps 20 -o "$work/mood2" -j 2 &&
    cmp "$work/mood1/model.safetensors" "$work/mood2/model.safetensors"
}
check "classify" classifies
check "classify twice" repeats
check "classify --model" status 0 "${moods[@]}" --model "$work/folder" --steps 2 -o "$work/mood1"
check "classify, no such file" fails_with 1 "no/such cannot be opened" build/classify no/such \
  -o "$work/mood1"
check "classify, no labels" fails_with 1 "line 1: expected a label" build/classify README.md \
  -o "$work/mood1"
check "classify --load, not its folder" fails_with 1 "labels.txt is not there" build/classify \
  --load $tiny -t x
check "classify, nowhere to write" fails_with 1 "no/such" "${moods[@]}" --steps 2 -o no/such/folder
check "classify --load and FILE" fails_with 2 "learns nothing" "${moods[@]}" --load "$work/mood"

round_trip() { # TOKENIZER
  printf 'Hello, world! It costs 3 EUR.\n' > "$work/text"
  build/tokenize "$1" < "$work/text" > "$work/ids" && build/tokenize --decode "$1" < "$work/ids" |
    cmp - "$work/text" && build/tokenize --pieces "$1" < "$work/text" |
    cut -f 1 | paste -sd ' ' | cmp - "$work/ids"
}
check "tokenize and back" round_trip $tiny

trains() { # KIND:N: a vocabulary of a text, which the text goes through and comes back
  status 0 build/tokenize --train "$1" README.md CHANGELOG.md -o "$work/tokenizer.json" &&
    round_trip "$work/tokenizer.json" && build/tokenize "$work/tokenizer.json" < README.md |
    build/tokenize --decode "$work/tokenizer.json" | cmp - README.md &&
    rm "$work/tokenizer.json"
}
check "tokenize --train bpe" trains bpe:500
check "tokenize --train word" status 0 build/tokenize --train word:300 README.md -o "$work/words"
check "tokenize --train char" status 0 build/tokenize --train char README.md -o "$work/chars"
check "tokenize --train tells" grep -q "characters, [0-9]* tokens" "$work/err"
check "tokenize --train, no overwriting" fails_with 2 "exists; --force" build/tokenize --train bpe \
  README.md -o "$work/chars"
check "tokenize --train, no output" fails_with 2 "needs the FILE" build/tokenize --train bpe \
  README.md
check "tokenize --train, no such kind" fails_with 2 "bpe:N" build/tokenize --train bep:1 x -o y

chat() { # INPUT OPTION...: a conversation with the tiny model, whose template is named
  printf "$1" | build/generate $tiny --chat --template none -t 0 -n 6 "${@:2}" > "$work/out" \
    2> "$work/err" || { cat "$work/err"; return 1; }
}
talks() { # the second answer is to all that was said, as if it had been said at once
  chat 'Once upon\n/reset\n\nOnce upon\n' && [ "$(wc -l < "$work/out")" -ge 2 ] &&
    [ "$(head -c $(($(wc -c < "$work/out") / 2)) "$work/out" | md5sum)" = \
      "$(tail -c $(($(wc -c < "$work/out") / 2)) "$work/out" | md5sum)" ] &&
    grep -q "forgotten" "$work/err" && grep -q "template none" "$work/err"
}
keeps_cache() { # of 8 turns only the new words are computed
  chat "$(printf 'one more\\n%.0s' 1 2 3 4 5 6 7 8)" &&
    [ "$(sed -n 's/.*prompt \([0-9]*\) tokens.*/\1/p' "$work/err")" -lt 150 ]
}
forgets() {
  chat "$(printf 'one more time\\n%.0s' 1 2 3 4 5 6 7 8 9)" -c 48 &&
    grep -q "the oldest message and its answer are forgotten" "$work/err" &&
    [ "$(grep -c . "$work/out")" -ge 9 ]
}
check "generate --chat" talks
check "generate --chat keeps what it has read" keeps_cache
check "generate --chat forgets" forgets
check "generate --chat, too long a message" chat "$(printf 'word %.0s' {1..200})" -c 48
check "generate --chat tells that" grep -q "too long for the context" "$work/err"
check "generate --chat /help /system" chat '/help\n/system Be brief.\nHi\n//x\n' --prompt Hello
check "generate --chat tells its commands" grep -q "/reset" "$work/err"
check "generate --chat, no template" fails_with 1 "no chat template" build/generate $tiny --chat
check "generate --chat, another's template" fails_with 1 "im_start|> is not in this vocabulary" \
  build/generate $tiny --chat --template chatml
check "generate --template alone" fails_with 2 "go with --chat" build/generate $tiny --template none

step_by_step() { # MODEL VOCABULARY: one call, and token by token, write the same logits
  status 0 build/logits "$1" --ids "1 5,7 9" -o "$work/a" &&
    [ "$(stat -c %s "$work/a")" = $((4 * 4 * $2)) ] &&
    status 0 build/logits "$1" --ids "1 5 7 9" -o - --step && cmp "$work/a" "$work/out"
}
check "logits" step_by_step $tiny 384
check "logits, no ids" fails_with 1 "expected token ids" build/logits $tiny --ids "1 x" -o -

inspect_json() {
  build/inspect "$1" --context 64 --json | python3 -c '
import json, sys
found = json.load(sys.stdin)
assert found["family"] == "llama" and found["layers"] == int(sys.argv[1]), found
assert found["cache_bytes"] > 0 and found["tokenizer"] != "none", found' "$2"
}
check "inspect" status 0 build/inspect $tiny
check "inspect --json" inspect_json $tiny 2
tells_tensors() { # every tensor of the file, and no other
  status 0 build/inspect $tiny --tensors &&
    python3 -c 'import json, struct, sys
file = open(sys.argv[1], "rb")
names = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
assert {line.split()[0] for line in open(sys.argv[2])} == set(names) - {"__metadata__"}' \
      $tiny/model.safetensors "$work/out"
}
cp -r $tiny "$work/cut" && head -c 5000 $tiny/model.safetensors > "$work/cut/model.safetensors"
check "inspect --tensors" tells_tensors
check "inspect --tensors, a file cut off" fails_with 1 "cut off" build/inspect --tensors "$work/cut"

scores() { # OPTION...: predicts all but the first, and perplexity is e to the nats
  status 0 build/perplexity $tiny "$@" --json && python3 -c 'import json, math, sys
found = json.load(open(sys.argv[1]))
assert found["predicted"] == found["tokens"] - 1 > 1000, found
assert abs(math.exp(found["nats"]) / found["perplexity"] - 1) < 1e-5, found' "$work/out"
}
check "perplexity" scores -f README.md -c 64 -s 32
check "perplexity of stdin" eval "build/perplexity $tiny < CHANGELOG.md | grep -q ^perplexity"
check "perplexity, no such text" fails_with 1 "^perplexity: no/such cannot be opened$" \
  build/perplexity $tiny -f no/such
check "perplexity tells that once" eval '[ "$(wc -l < "$work/err")" = 1 ]'
check "perplexity, nothing to predict" fails_with 1 "fewer than 2 tokens" build/perplexity $tiny
check "perplexity, a window of one" fails_with 2 "from 2 to" build/perplexity $tiny -c 1
check "perplexity, a stride beyond it" fails_with 2 "at most the context" build/perplexity $tiny \
  -c 64 -s 65
check "perplexity of a folder" fails_with 1 "Is a directory" build/perplexity $tiny -f tests
check "perplexity, too long a context" fails_with 1 "model's 256" build/perplexity $tiny -c 9999
check "perplexity, a model cut off" fails_with 1 "cut off" build/perplexity "$work/cut"

converts() { # to GGUF and back: the same text
  status 0 build/convert $tiny "$work/c.gguf" --report &&
    grep -q "tensors, [0-9]* bytes" "$work/out" &&
    status 0 build/convert "$work/c.gguf" "$work/c" && greedy $tiny "Once" 16 &&
    mv "$work/out" "$work/first" && greedy "$work/c" "Once" 16 && cmp "$work/out" "$work/first"
}
keeps() { # TEXT COMMAND...: refused, and what was there before is there still, with nothing beside
  find "$work/c.gguf" "$work/c" -type f -exec md5sum {} + > "$work/before"
  fails_with 1 "$@" && md5sum --quiet -c "$work/before" && [ -z "$(find "$work" -name '*.part')" ]
}
check "convert" converts
check "convert, a file is there" keeps "is there already" build/convert $tiny "$work/c.gguf"
check "convert, a folder is there" keeps "is there already" build/convert $tiny "$work/c"
check "convert, a model cut off" keeps "cut off" build/convert "$work/cut" "$work/c.gguf" --force
check "convert, into itself" keeps "is what is to be converted" build/convert "$work/c" "$work/c" -f
check "convert, a type no folder has" keeps "cannot hold" build/convert $tiny "$work/c" -t q8_0 -f
check "convert --force" status 0 build/convert $tiny "$work/c.gguf" --force -t q8_0
check "convert, no such type" fails_with 2 "q8_0" build/convert $tiny "$work/d" --type q9
check "convert, experts to GGUF" status 0 build/convert tests/data/models/mixtral-b "$work/e.gguf"
check "convert, experts back" status 0 build/convert "$work/e.gguf" "$work/e"
check "convert, what GGUF cannot tell" fails_with 1 "no word for" build/convert \
  tests/data/models/qwen2moe-a "$work/q.gguf"
check "convert, that is not written" test ! -e "$work/q.gguf" -a ! -e "$work/q.gguf.part"
check "convert, a file of something else" fails_with 1 "not recognised" build/convert README.md \
  "$work/q"
check "convert, no OUT" fails_with 2 "MODEL and OUT" build/convert $tiny
check "convert, no such model" fails_with 1 "no/such" build/convert no/such "$work/d"

check "bench --json" status 0 build/bench $tiny -p 8 -n 8 --repeat 1 --json
check "bench --json prints JSON" python3 -c 'import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
assert [r["workload"] for r in rows] == ["pp8", "tg8"], rows
assert all(r["tokens_per_s"] > 0 for r in rows), rows' \
  "$work/out"

if [ -f $stories/stories260K.bin ]; then
  same_text() {
    status 0 build/generate "$1" -t 0 -n 250 &&
      diff "$work/out" $stories/stories260K-greedy-n250.txt
  }
  check "llama2.c's text" same_text $stories/stories260K.bin
  check "the same from GGUF" same_text $stories/stories260K.gguf
  stops_early() {
    status 0 build/generate $stories/stories260K.bin -t 0 --stop ' She loved' &&
      grep -qx 'Once upon a time, there was a little girl named Lily.' "$work/out"
  }
  check "--stop" stops_early
  check "tokenize stories260K" round_trip $stories/tok512.bin
  check "inspect stories260K" inspect_json $stories/stories260K.gguf 5
else
  echo "skip stories260K: ../shared/data is not there"
  skipped=$((skipped + 5))
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
