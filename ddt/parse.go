// SPDX-License-Identifier: Apache-2.0

package ddt

// Parse reads a type as text: FPsPIN's grammar and more, see docs/datatypes.md. Errors are
// *SyntaxError.
func Parse(text string) (*Type, error) { panic("not yet") }

// A SyntaxError says where a text is no type, and why.
type SyntaxError struct {
	Line, Column int // from 1, in bytes
	Err          error
}

// String writes the type so that Parse reads the same.
func (t *Type) String() string { panic("not yet") }
