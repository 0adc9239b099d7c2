// SPDX-License-Identifier: Apache-2.0

package ddt

// An App is a datatype that an application uses: those of SC 2019, figure 16, and the two
// of FPsPIN's evaluation.
type App struct {
	Name   string // COMB, FFT2D, ..., Simple, Complex
	Help   string // one line: what moves
	Origin string // of the shape: program, routine, input
	Params []Param
	Make   func(params map[string]int64) (t *Type, count int64, err error)
}

// A Param is a number that gives an App its shape.
type Param struct {
	Name    string
	Help    string
	Default int64
}

// Apps returns all of them.
func Apps() []App { panic("not yet") }

// Resolve returns what a text names: an App, as NAME or NAME(param=number ...), with its
// count; or a type as Parse reads it, with count 1.
func Resolve(text string) (t *Type, count int64, err error) { panic("not yet") }
