// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// A printable is an error whose text may come from an object file, and is shown on terminals.
type printable struct{ error }

// Error returns the text of the error without what a terminal obeys; errors.Join puts ends of lines between several.
func (e printable) Error() string {
	lines := strings.Split(e.error.Error(), "\n")
	for i := range lines {
		lines[i] = shown(lines[i])
	}
	return strings.Join(lines, "\n")
}

func (e printable) Unwrap() error { return e.error }

// show returns an error that can be shown, nil if there is none.
func show(err error) error {
	if err == nil {
		return nil
	}
	return printable{err}
}

// shown returns a line of text with ? in the place of what is neither printable nor a tab.
func shown(line string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) && r != '\t' || r == utf8.RuneError {
			return '?'
		}
		return r
	}, line)
}

// isPlain tells whether a name has only printable characters of ASCII.
func isPlain[T string | []byte](name T) bool {
	for i := range len(name) {
		if name[i] < ' ' || name[i] > '~' {
			return false
		}
	}
	return true
}
