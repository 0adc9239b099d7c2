// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/internal/regular"
)

// datatypeHelp describes in the help of a command what datatypeArg takes.
const datatypeHelp = `TYPE is the name of an application's datatype, such as Simple or MILC(nx=8), see
xspin ddt ls; a type as text, such as 'vec(4 2 5)[int]'; or a file that has either,
as FILE or, if its name could be something else, @FILE.`

// datatypeArg returns the type that an argument names, and how many elements: count, or
// if that is 0 as many as the name says, which is 1 for a type as text.
func datatypeArg(text string, count int64) (*ddt.Type, int64, error) {
	if count < 0 {
		return nil, 0, flags.Error("count", count, "want 1 or more, or 0 for what TYPE says")
	}
	t, n, err := datatype(text)
	if err != nil {
		return nil, 0, err
	}
	if count > 0 {
		n = count
	}
	return t, n, nil
}

// datatype reads a file only if the text is not a type.
func datatype(text string) (*ddt.Type, int64, error) {
	if path, ok := strings.CutPrefix(text, "@"); ok {
		return datatypeFile(path)
	}
	t, count, err := ddt.Resolve(text)
	if err == nil {
		return t, count, nil
	}
	switch t, count, fileErr := datatypeFile(text); {
	case errors.Is(fileErr, fs.ErrNotExist), errors.Is(fileErr, unix.ENAMETOOLONG), errors.Is(fileErr, unix.ENOTDIR), errors.Is(fileErr, unix.EINVAL):
		err = typeError(err, "", text)
		if !strings.ContainsAny(text, "([") {
			err = fmt.Errorf("%w\nNor is there a file %s", err, printable(text))
		}
		return nil, 0, err
	default:
		return t, count, fileErr
	}
}

func datatypeFile(path string) (*ddt.Type, int64, error) {
	f, err := regular.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, ddt.MaxText+1)) // Parse refuses more
	if err != nil {
		return nil, 0, err
	}
	t, count, err := ddt.Resolve(string(text))
	if err != nil {
		return nil, 0, typeError(err, path, string(text))
	}
	return t, count, nil
}

// typeError shows where in a text an error is.
func typeError(err error, path, text string) error {
	if path != "" {
		path += ":"
	}
	var se *ddt.SyntaxError
	if !errors.As(err, &se) {
		return fmt.Errorf("type %s%w", path, err)
	}
	return fmt.Errorf("type %s%w\n%s", path, err, caret(text, se.Line, se.Column))
}

// caret returns the line of a text and, below it, a caret under the column. It cuts a long
// line to what is around the column.
func caret(text string, line, column int) string {
	for ; line > 1; line-- {
		_, text, _ = strings.Cut(text, "\n")
	}
	text, _, _ = strings.Cut(text, "\n")
	at := min(column-1, len(text))
	const most = 72
	before, after := text[:at], text[at:]
	if len(before) > most/2 && len(text) > most {
		before = before[at-most/2:]
		for len(before) > 0 && !utf8.RuneStart(before[0]) {
			before = before[1:]
		}
		before = "..." + before
	}
	if len(after) > most/2 && len(text) > most {
		n := most / 2
		for n > most/2-utf8.UTFMax && !utf8.RuneStart(after[n]) {
			n--
		}
		after = after[:n] + "..."
	}
	before = printable(before)
	pad := strings.Map(func(r rune) rune {
		if r == '\t' {
			return r // as wide as the tab above
		}
		return ' '
	}, before)
	return "  " + before + printable(after) + "\n  " + pad + "^"
}

// printable escapes all but printable characters and tabs, so that a terminal only shows
// the text.
func printable(text string) string {
	var b strings.Builder
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRuneInString(text[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, text[i])
		case r == '\t' || unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
		i += n
	}
	return b.String()
}
