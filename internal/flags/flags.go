// SPDX-License-Identifier: Apache-2.0

// Package flags says what the values of flags may be: to people, in errors, and to a shell
// that completes them.
package flags

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Error says what the value of a flag may be.
func Error(flag string, value any, want string) error {
	return fmt.Errorf("--%s %v: %s", flag, value, want)
}

// Bytes reads a number of bytes such as 1000, 64KiB or 1GiB.
func Bytes(flag, s string, lo, hi int64) (int64, error) {
	digits, shift := s, 0
	for i, unit := range []string{"KiB", "MiB", "GiB"} {
		if d, ok := strings.CutSuffix(s, unit); ok {
			digits, shift = strings.TrimSpace(d), 10*(i+1)
		}
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n > math.MaxInt64>>shift || n<<shift < lo || n<<shift > hi {
		return 0, Error(flag, cmp.Or(s, `""`), fmt.Sprintf("want %s to %s: bytes, or with KiB, MiB or GiB", size(lo), size(hi)))
	}
	return n << shift, nil
}

// size is a number of bytes as Bytes reads it.
func size(n int64) string {
	for _, u := range []struct {
		shift int
		name  string
	}{{30, "GiB"}, {20, "MiB"}, {10, "KiB"}} {
		if n > 0 && n&(1<<u.shift-1) == 0 {
			return fmt.Sprint(n>>u.shift, u.name)
		}
	}
	return fmt.Sprint(n)
}

// What a flag's value is, for completion: annotations of the flag.
const (
	oneValue    = "xspin_one"  // one of these
	valueList   = "xspin_list" // one or more of these, separated by commas
	valueOrFile = "xspin_file" // one of these, or a file
)

// OneOf says which values there are for a flag.
func OneOf[S ~string](fl *pflag.FlagSet, flag string, values []S) {
	annotate(fl, flag, oneValue, values)
}

// ListOf says which values there are for a flag that takes several.
func ListOf[S ~string](fl *pflag.FlagSet, flag string, values []S) {
	annotate(fl, flag, valueList, values)
}

// OneOfOrFile says which values there are for a flag that takes a file too.
func OneOfOrFile[S ~string](fl *pflag.FlagSet, flag string, values []S) {
	annotate(fl, flag, valueOrFile, values)
}

func annotate[S ~string](fl *pflag.FlagSet, flag, as string, values []S) {
	var texts []string
	for _, v := range values {
		texts = append(texts, string(v))
	}
	if err := fl.SetAnnotation(flag, as, texts); err != nil {
		panic(err) // there is no such flag
	}
}

// filenameFlags are those whose value is, or can be, the name of a file.
var filenameFlags = []string{"config", "filter", "image", "in", "out", "pcap", "socket", "write"}

// Completion returns what completes the value of a flag, nil for nothing.
func Completion(f *pflag.Flag) cobra.CompletionFunc {
	if values, ok := f.Annotations[oneValue]; ok {
		return cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	}
	if values, ok := f.Annotations[valueOrFile]; ok {
		return cobra.FixedCompletions(values, cobra.ShellCompDirectiveDefault)
	}
	if values, ok := f.Annotations[valueList]; ok {
		return func(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			before := typed[:strings.LastIndex(typed, ",")+1]
			taken := strings.Split(before, ",")
			var words []string
			for _, v := range values {
				if !slices.Contains(taken, v) {
					words = append(words, before+v)
				}
			}
			return words, cobra.ShellCompDirectiveNoFileComp
		}
	}
	switch {
	case f.Name == "dir":
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
	case slices.Contains(filenameFlags, f.Name):
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault)
	}
	return nil
}
